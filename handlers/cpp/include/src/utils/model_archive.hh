// The manifest of an archive.
#pragma once

#include <string>

#include "src/utils/json.hh"
#include "src/utils/logging.hh"

namespace torchserve {

class Manifest {
 public:
  using RuntimeType = std::string;

  // Members are empty if the manifest lacks their value.
  struct Model {
    std::string model_name;
    std::string model_version;
    std::string workflow_name;
    std::string description;
    std::string handler;
    std::string envelope;
    std::string serialized_file;
    std::string model_file;
    std::string extensions;
    std::string requirements_file;
    std::string spec_file;
  };

  // Reads MANIFEST.json; returns false, and logs why, if that fails.
  bool Initialize(const std::string& path) {
    try {
      Read(Json::ParseJsonFile(path));
      return true;
    } catch (const std::exception& error) {
      TS_LOGF(ERROR, "can't read the manifest: {}", error.what());
      return false;
    }
  }

  // Throws std::invalid_argument if a value is no text.
  void Read(const Json& manifest) {
    const Json model = manifest.HasKey("model") ? manifest.GetValue("model") : Json();
    Set(manifest, "createdOn", create_on_);
    Set(manifest, "archiverVersion", archiver_version_);
    Set(manifest, "runtime", runtime_type_);
    Set(model, "modelName", model_.model_name);
    Set(model, "modelVersion", model_.model_version);
    Set(model, "workflowName", model_.workflow_name);
    Set(model, "description", model_.description);
    Set(model, "handler", model_.handler);
    Set(model, "envelope", model_.envelope);
    Set(model, "serializedFile", model_.serialized_file);
    Set(model, "modelFile", model_.model_file);
    Set(model, "extensions", model_.extensions);
    Set(model, "requirementsFile", model_.requirements_file);
    Set(model, "specFile", model_.spec_file);
  }

  const std::string& GetCreatOn() { return create_on_; }  // the interface spells it so
  const std::string& GetArchiverVersion() { return archiver_version_; }
  const std::string& GetRuntimeType() { return runtime_type_; }
  const Model& GetModel() { return model_; }
  void SetHandler(const std::string& handler) { model_.handler = handler; }

 private:
  static void Set(const Json& from, const std::string& key, std::string& value) {
    if (from.HasKey(key)) {
      value = from.GetValue(key).AsString();
    }
  }

  std::string create_on_;
  std::string archiver_version_;
  RuntimeType runtime_type_;
  Model model_;
};

}  // namespace torchserve
