// The handler of models in TorchScript.
#pragma once

#include "src/backends/handler/base_handler.hh"

namespace torchserve {

class TorchScriptHandler : public BaseHandler {
 public:
  // Loads the archive's serialized file. Throws c10::Error if it is no TorchScript.
  std::pair<std::shared_ptr<void>, std::shared_ptr<torch::Device>> LoadModel(
      std::shared_ptr<LoadModelRequest>& load_model_request) override {
    auto device = GetTorchDevice(load_model_request);
    const std::string file = load_model_request->model_dir + "/" + manifest_->GetModel().serialized_file;
    return {std::make_shared<torch::jit::Module>(torch::jit::load(file, *device)), device};
  }
};

}  // namespace torchserve
