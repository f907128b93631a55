// Handlers of the tests, in the style of TorchServe's examples for its C++ backend.
#include <csignal>

#include "src/backends/handler/torch_scripted_handler.hh"
#include "src/utils/file_system.hh"
#include "src/utils/json.hh"

namespace tests {

using Ids = std::pair<std::string&, std::map<uint8_t, std::string>&>;
using Requests = std::shared_ptr<torchserve::InferenceRequestBatch>;
using Responses = std::shared_ptr<torchserve::InferenceResponseBatch>;

// A model in TorchScript; its answers are names of classes.
class Digits : public torchserve::TorchScriptHandler {
 public:
  std::pair<std::shared_ptr<void>, std::shared_ptr<torch::Device>> LoadModel(
      std::shared_ptr<torchserve::LoadModelRequest>& load_model_request) override {
    const std::string names = fmt::format("{}/{}", load_model_request->model_dir, "index_to_name.json");
    names_ = std::make_unique<torchserve::Json>(torchserve::Json::ParseJsonFile(names));
    return TorchScriptHandler::LoadModel(load_model_request);
  }

  void Postprocess(c10::IValue& data, Ids& idx_to_req_id, Responses& response_batch) override {
    auto classes = torch::argmax(data.toTensor(), 1);
    TS_LOGF(INFO, "{} classes for {} requests", classes.size(0), response_batch->size());
    for (const auto& kv : idx_to_req_id.second) {
      auto response = (*response_batch)[kv.second];
      response->SetResponse(200, "data_type", torchserve::PayloadType::kDATA_TYPE_STRING,
                            names_->GetValue(std::to_string(classes[kv.first].item<int>())).AsString());
    }
  }

 private:
  std::unique_ptr<torchserve::Json> names_;
};

// Does what the body of a request says, and has no model.
class Obedient : public torchserve::BaseHandler {
 public:
  std::pair<std::shared_ptr<void>, std::shared_ptr<torch::Device>> LoadModel(
      std::shared_ptr<torchserve::LoadModelRequest>& load_model_request) override {
    load_ = load_model_request;
    return std::make_pair(nullptr, GetTorchDevice(load_model_request));
  }

  c10::IValue Preprocess(std::shared_ptr<torch::Device>& device, Ids& idx_to_req_id, Requests& request_batch,
                         Responses& response_batch) override {
    bool throws = false;
    for (auto& request : *request_batch) {
      const auto body = torchserve::Converter::VectorToStr(request.parameters["body"]);
      if (body == "silence") {
        continue;
      }
      auto response = (*response_batch)[request.request_id] =
          std::make_shared<torchserve::InferenceResponse>(request.request_id);
      response->SetResponse(200, "data_type", torchserve::PayloadType::kDATA_TYPE_STRING,
                            Answer(body, request));
      if (body == "refuse" || body == "refuse and throw") {
        response->SetResponse(413, "data_type", "string", "too \"large\"");
      }
      throws = throws || body == "throw" || body == "refuse and throw";
    }
    TORCH_CHECK(!throws, "told to throw");
    return c10::IValue();
  }

  c10::IValue Inference(std::shared_ptr<void> model, c10::IValue& inputs,
                        std::shared_ptr<torch::Device>& device, Ids& idx_to_req_id,
                        Responses& response_batch) override {
    return inputs;
  }

  void Postprocess(c10::IValue& data, Ids& idx_to_req_id, Responses& response_batch) override {}

 private:
  std::string Answer(const std::string& body, torchserve::InferenceRequest& request) {
    if (body == "crash") {
      std::raise(SIGSEGV);
    } else if (body == "request") {
      std::string text;
      for (const auto& kv : request.headers) {
        text += fmt::format("{}={}\n", kv.first, kv.second);
      }
      for (const auto& kv : request.parameters) {
        text += fmt::format("{}: {} bytes\n", kv.first, kv.second.size());
      }
      return text;
    } else if (body == "load") {
      return fmt::format("{} {} {} {} {}", load_->model_name, load_->gpu_id, load_->batch_size,
                         manifest_->GetModel().handler, model_dir_ == load_->model_dir);
    } else if (body == "log") {
      TS_LOG(WARN, "plain {}");
      TS_LOGF(ERROR, "{} and {:.2f}", "one", 2.0);
      TS_LOGF(ERROR, "{} and {}", "only one");
      TS_LOG(DEBUG, "too low");
    } else if (body == "metrics") {
      auto& metric = torchserve::MetricsRegistry::GetMetricsCacheInstance()->GetMetric(
          torchserve::MetricType::GAUGE, "HandlerTime");
      metric.AddOrUpdate(std::vector<std::string>{"other", "Model"}, request.request_id, 1.5);
      try {
        torchserve::MetricsRegistry::GetMetricsCacheInstance()->GetMetric(torchserve::COUNTER, "Unknown");
      } catch (const std::invalid_argument& e) {
        return e.what();
      }
    } else if (body.rfind("json ", 0) == 0) {
      return Read(body.substr(5));
    }
    return body;
  }

  static std::string Read(const std::string& text) {
    try {
      auto json = torchserve::Json::Parse(text);
      auto item = json.GetValue("list").GetValue(1).AsString();
      return fmt::format("{} {} {} {}", item, json.GetValue("n").AsInt(), json.HasKey("none"),
                         json.HasKey("list"));
    } catch (const std::exception& e) {
      return e.what();
    }
  }

  std::shared_ptr<torchserve::LoadModelRequest> load_;
};

class Unloadable : public Obedient {
 public:
  std::pair<std::shared_ptr<void>, std::shared_ptr<torch::Device>> LoadModel(
      std::shared_ptr<torchserve::LoadModelRequest>& load_model_request) override {
    torchserve::FileSystem::LoadBytesFromFile(load_model_request->model_dir + "/weights.bin");
    return std::make_pair(nullptr, nullptr);
  }
};

}  // namespace tests

extern "C" {
torchserve::BaseHandler* allocatorDigits() { return new tests::Digits(); }
void deleterDigits(torchserve::BaseHandler* p) { delete p; }
torchserve::BaseHandler* allocatorObedient() { return new tests::Obedient(); }
void deleterObedient(torchserve::BaseHandler* p) { delete p; }
torchserve::BaseHandler* allocatorUnloadable() { return new tests::Unloadable(); }
void deleterUnloadable(torchserve::BaseHandler* p) { delete p; }
}
