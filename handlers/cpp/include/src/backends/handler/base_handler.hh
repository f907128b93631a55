// The base class of handlers in C++. A library that includes this header exports torchere's C interface, too.
#pragma once

#include <caffe2/serialize/inline_container.h>
#include <torch/csrc/jit/serialization/import_read.h>
#include <torch/script.h>
#include <torch/torch.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <regex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "src/utils/logging.hh"
#include "src/utils/message.hh"
#include "src/utils/metrics/registry.hh"
#include "src/utils/model_archive.hh"

namespace torchserve {

namespace detail {

class Bytes final : public caffe2::serialize::ReadAdapterInterface {
 public:
  explicit Bytes(const std::vector<char>& bytes) : bytes_(bytes) {}
  size_t size() const override { return bytes_.size(); }
  size_t read(uint64_t pos, void* buf, size_t n, const char* /*what*/ = "") const override {
    n = pos < bytes_.size() ? std::min<size_t>(n, bytes_.size() - pos) : 0;
    std::copy_n(bytes_.begin() + (n ? pos : 0), n, static_cast<char*>(buf));
    return n;
  }

 private:
  const std::vector<char>& bytes_;
};

// Returns whether a pickle has the opcodes that torch.save and torch::pickle_save write for a dense tensor.
inline bool IsTensorPickle(const char* begin, size_t size) {
  const std::string any = R"([\s\S])", memo = "(?:q" + any + ")?";
  const std::string number = "(?:K" + any + "|M" + any + "{2}|J" + any + "{4}|\\x8a\\x08" + any + "{8})";
  const std::string tuple = "(?:\\)|(?:" + number + "\\x85|" + number + "{2}\\x86|" + number +
                            "{3}\\x87|\\(" + number + "*t)" + memo + ")";
  static const std::regex form(
      R"(\x80\x02ctorch\._utils\n_rebuild_tensor_v2\n)" + memo + R"(\(\(X\x07\x00\x00\x00storage)" + memo +
      R"(ctorch\n(?!Q)\w+Storage\n)" + memo + R"(X\x01\x00\x00\x000)" + memo +
      R"((?:X\x03\x00\x00\x00cpu|X\x06\x00\x00\x00cuda:\d))" + memo + number + "t" + memo + "Q" + memo +
      number + tuple + tuple + R"([\x88\x89]ccollections\nOrderedDict\n)" + memo + R"(\)R)" + memo + "t" +
      memo + "R" + memo + R"(\.)");
  constexpr size_t kMaxBytes = 2048;  // 64 dimensions take 1,500
  return size <= kMaxBytes && std::regex_match(begin, begin + size, form);
}

}  // namespace detail

// Reads the file that torch.save or torch::pickle_save writes for a dense tensor.
//
// torch::pickle_load is for trusted files: it takes sizes from the pickle without comparing them with the
// bytes of the file. Throws c10::Error for a damaged file, std::runtime_error for one of another kind.
inline torch::Tensor TensorOfFile(const std::vector<char>& file) {
  caffe2::serialize::PyTorchStreamReader reader(std::make_shared<detail::Bytes>(file));
  const size_t bytes = reader.getRecordSize("data/0");
  // A compressed record may become a thousand times as large.
  if (std::max(bytes, reader.getRecordSize("data.pkl")) > file.size()) {
    throw std::runtime_error("its records are longer than the file");
  }
  const auto [pickle, size] = reader.getRecord("data.pkl");
  if (!detail::IsTensorPickle(static_cast<const char*>(pickle.get()), size)) {
    throw std::runtime_error("it is no plain dense tensor of torch.save");
  }
  auto tensor = torch::jit::readArchiveAndTensors("data", "", "", {}, {}, torch::kCPU, reader).toTensor();
  // In floating point, because products of hostile sizes overflow.
  double elements = 1, last = static_cast<double>(tensor.storage_offset());
  // Older torch takes a negative number of elements, whose bytes may overflow to these, and reads none.
  bool fits = tensor.storage().nbytes() == bytes && (bytes == 0 || tensor.storage().data() != nullptr) &&
              tensor.storage_offset() >= 0;
  for (int64_t at = 0; at < tensor.dim(); ++at) {
    fits = fits && tensor.size(at) >= 0 && tensor.stride(at) >= 0;
    elements *= static_cast<double>(tensor.size(at));
    last += static_cast<double>(tensor.size(at) - 1) * static_cast<double>(tensor.stride(at));
  }
  const double room = static_cast<double>(bytes / tensor.element_size());
  if (!fits || (elements > 0 && last >= room) || elements > room) {  // an expanded tensor repeats elements
    throw std::runtime_error("its shape is larger than its data");
  }
  return tensor;
}

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
      rows.push_back(TensorOfFile(payload->second).to(*device));
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
