// The base class of handlers in C++. A library that includes this header exports torchere's C interface, too.
#pragma once

#include <torch/script.h>
#include <torch/torch.h>

#include <array>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "src/utils/logging.hh"
#include "src/utils/message.hh"
#include "src/utils/metrics/registry.hh"
#include "src/utils/model_archive.hh"

namespace torchserve {

// One object serves one worker: it loads the model once, and handles one batch at a time.
class BaseHandler {
 public:
  // The comma-separated ids of the batch, and the id for each row of the model's input.
  using RequestIds = std::pair<std::string&, std::map<uint8_t, std::string>&>;

  BaseHandler() = default;
  virtual ~BaseHandler() = default;

  virtual void Initialize(const std::string& model_dir, std::shared_ptr<Manifest>& manifest) {
    model_dir_ = model_dir;
    manifest_ = manifest;
  }

  // Returns the model, in the form that `Inference` takes, and its device.
  virtual std::pair<std::shared_ptr<void>, std::shared_ptr<torch::Device>> LoadModel(
      std::shared_ptr<LoadModelRequest>& load_model_request) = 0;

  // Reads a file of torch.save from each request and stacks the tensors. Adds a response for each request,
  // with the code 500 if the request has no tensor.
  virtual c10::IValue Preprocess(std::shared_ptr<torch::Device>& device, RequestIds& idx_to_req_id,
                                 std::shared_ptr<InferenceRequestBatch>& request_batch,
                                 std::shared_ptr<InferenceResponseBatch>& response_batch);

  // Runs a model in TorchScript.
  virtual c10::IValue Inference(std::shared_ptr<void> model, c10::IValue& inputs,
                                std::shared_ptr<torch::Device>& device, RequestIds& idx_to_req_id,
                                std::shared_ptr<InferenceResponseBatch>& response_batch);

  // Responds to each request with its row of the output, as a file of torch.save.
  virtual void Postprocess(c10::IValue& data, RequestIds& idx_to_req_id,
                           std::shared_ptr<InferenceResponseBatch>& response_batch);

  // Runs the three stages. Throws what they throw.
  void Handle(std::shared_ptr<void> model, std::shared_ptr<torch::Device>& device,
              std::shared_ptr<InferenceRequestBatch>& request_batch,
              std::shared_ptr<InferenceResponseBatch>& response_batch);

  // Seconds of the three stages in the last batch; 0 for a stage that was not run.
  const std::array<double, 3>& StageSeconds() const { return stage_seconds_; }

 protected:
  std::shared_ptr<torch::Device> GetTorchDevice(std::shared_ptr<LoadModelRequest>& load_model_request) {
    const int gpu = load_model_request->gpu_id;
    return gpu < 0 ? std::make_shared<torch::Device>(torch::kCPU)
                   : std::make_shared<torch::Device>(torch::kCUDA, static_cast<c10::DeviceIndex>(gpu));
  }

  std::shared_ptr<Manifest> manifest_;
  std::string model_dir_;

 private:
  template <typename Stage>
  auto Timed(int place, Stage stage) {
    struct Clock {
      double& seconds;
      std::chrono::steady_clock::time_point begin = std::chrono::steady_clock::now();
      ~Clock() { seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(); }
    } clock{stage_seconds_[place]};
    return stage();
  }

  std::array<double, 3> stage_seconds_{};
};

inline c10::IValue BaseHandler::Preprocess(std::shared_ptr<torch::Device>& device, RequestIds& idx_to_req_id,
                                           std::shared_ptr<InferenceRequestBatch>& request_batch,
                                           std::shared_ptr<InferenceResponseBatch>& response_batch) {
  std::vector<torch::Tensor> rows;
  for (const auto& request : *request_batch) {
    const std::string& id = request.request_id;
    auto response = (*response_batch)[id] = std::make_shared<InferenceResponse>(id);
    idx_to_req_id.first += (idx_to_req_id.first.empty() ? "" : ",") + id;
    auto payload = request.parameters.find(PayloadType::kPARAMETER_NAME_DATA);
    const bool is_data = payload != request.parameters.end();
    if (!is_data) {
      payload = request.parameters.find(PayloadType::kPARAMETER_NAME_BODY);
    }
    const auto type = request.headers.find(is_data ? PayloadType::kHEADER_NAME_DATA_TYPE
                                                   : PayloadType::kHEADER_NAME_BODY_TYPE);
    if (payload == request.parameters.end() || type == request.headers.end()) {
      TS_LOGF(ERROR, "request {} has no data and no body", id);
      response->SetResponse(500, "data_type", PayloadType::kCONTENT_TYPE_TEXT, "Empty payload");
      continue;
    }
    const auto refuse = [&](const char* kind, const char* cause) {
      TS_LOGF(ERROR, "request {} has no tensor: {}", id, cause);
      response->SetResponse(500, "data_type", PayloadType::kDATA_TYPE_STRING,
                            std::string(kind) + ", failed to load tensor");
    };
    try {
      if (type->second != PayloadType::kDATA_TYPE_BYTES) {
        throw std::runtime_error("its type is " + type->second + ", expected bytes: a file of torch.save");
      }
      rows.push_back(torch::pickle_load(payload->second).toTensor().to(*device));
      idx_to_req_id.second[static_cast<uint8_t>(rows.size() - 1)] = id;
    } catch (const c10::Error& error) {
      refuse("c10 error", error.what_without_backtrace());
    } catch (const std::runtime_error& error) {
      refuse("runtime_error", error.what());
    }
  }
  auto inputs = c10::impl::GenericList(c10::TensorType::get());
  if (!rows.empty()) {
    inputs.emplace_back(torch::stack(rows));
  }
  return inputs;
}

inline c10::IValue BaseHandler::Inference(std::shared_ptr<void> model, c10::IValue& inputs,
                                          std::shared_ptr<torch::Device>& /*device*/,
                                          RequestIds& idx_to_req_id,
                                          std::shared_ptr<InferenceResponseBatch>& response_batch) {
  try {
    torch::NoGradGuard no_grad;
    const auto given = inputs.toListRef();
    return std::static_pointer_cast<torch::jit::Module>(model)
        ->forward(std::vector<c10::IValue>(given.begin(), given.end()))
        .toTensor();
  } catch (const std::runtime_error&) {
    for (const auto& [row, id] : idx_to_req_id.second) {
      (*response_batch)[id]->SetResponse(500, "data_type", PayloadType::kDATA_TYPE_STRING,
                                         "runtime_error, failed to inference");
    }
    throw;
  }
}

inline void BaseHandler::Postprocess(c10::IValue& data, RequestIds& idx_to_req_id,
                                     std::shared_ptr<InferenceResponseBatch>& response_batch) {
  const auto output = data.toTensor();
  for (const auto& [row, id] : idx_to_req_id.second) {
    (*response_batch)[id]->SetResponse(200, "data_type", PayloadType::kDATA_TYPE_BYTES,
                                       torch::pickle_save(output[row]));
  }
}

inline void BaseHandler::Handle(std::shared_ptr<void> model, std::shared_ptr<torch::Device>& device,
                                std::shared_ptr<InferenceRequestBatch>& request_batch,
                                std::shared_ptr<InferenceResponseBatch>& response_batch) {
  std::string ids;
  std::map<uint8_t, std::string> id_of_row;
  RequestIds idx_to_req_id(ids, id_of_row);
  stage_seconds_ = {};
  auto inputs = Timed(0, [&] { return Preprocess(device, idx_to_req_id, request_batch, response_batch); });
  auto outputs = Timed(1, [&] { return Inference(model, inputs, device, idx_to_req_id, response_batch); });
  Timed(2, [&] { Postprocess(outputs, idx_to_req_id, response_batch); });
}

}  // namespace torchserve

#include "torchere/interface.hh"
