// Requests, responses, and the request to load a model.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace torchserve {

// Names of parameters and of headers, and values of headers.
class PayloadType {
 public:
  static inline const std::string kPARAMETER_NAME_DATA = "data";
  static inline const std::string kPARAMETER_NAME_BODY = "body";
  static inline const std::string kHEADER_NAME_DATA_TYPE = "data_dtype";
  static inline const std::string kHEADER_NAME_BODY_TYPE = "body_dtype";
  static inline const std::string kCONTENT_TYPE_JSON = "application/json";
  static inline const std::string kCONTENT_TYPE_TEXT = "text";
  static inline const std::string kDATA_TYPE_STRING = "string";
  static inline const std::string kDATA_TYPE_BYTES = "bytes";
};

class Converter {
 public:
  static std::vector<std::byte> StrToBytes(const std::string& text) {
    const auto* first = reinterpret_cast<const std::byte*>(text.data());
    return {first, first + text.size()};
  }

  // Copies by pointers, because libstdc++ copies other iterators byte by byte.
  static std::vector<char> StrToVector(const std::string& text) {
    return {text.data(), text.data() + text.size()};
  }

  static std::string VectorToStr(const std::vector<char>& bytes) { return {bytes.data(), bytes.size()}; }
};

struct LoadModelRequest {
  const std::string model_dir;  // the unpacked archive
  const std::string model_name;
  int gpu_id;  // -1: the CPU
  const std::string handler;  // as the manifest names it
  const std::string envelope;  // always empty: handlers in C++ get requests unchanged
  int batch_size;
  bool limit_max_image_pixels;

  LoadModelRequest(const std::string& model_dir, const std::string& model_name, int gpu_id,
                   const std::string& handler, const std::string& envelope, int batch_size,
                   bool limit_max_image_pixels)
      : model_dir(model_dir),
        model_name(model_name),
        gpu_id(gpu_id),
        handler(handler),
        envelope(envelope),
        batch_size(batch_size),
        limit_max_image_pixels(limit_max_image_pixels) {}
};

struct InferenceRequest {
  using Headers = std::map<std::string, std::string>;
  using Parameters = std::map<std::string, std::vector<char>>;

  std::string request_id;
  Headers headers;  // the client's, and the content type of each parameter under NAME:contentType
  Parameters parameters;

  InferenceRequest() = default;
  InferenceRequest(const std::string& request_id, const Headers& headers, const Parameters& parameters)
      : request_id(request_id), headers(headers), parameters(parameters) {}
};

using InferenceRequestBatch = std::vector<InferenceRequest>;

struct InferenceResponse {
  using Headers = std::map<std::string, std::string>;

  int code = 200;
  std::string request_id;
  Headers headers;
  std::vector<char> msg;

  explicit InferenceResponse(const std::string& request_id) : request_id(request_id) {}

  void SetResponse(int code, const std::string& header, const std::string& value,
                   const std::vector<char>& body) {
    Set(code, header, value, body.data(), body.size());
  }

  void SetResponse(int code, const std::string& header, const std::string& value, const std::string& body) {
    Set(code, header, value, body.data(), body.size());
  }

 private:
  void Set(int code, const std::string& header, const std::string& value, const char* body,
           std::size_t size) {
    this->code = code;
    headers[header] = value;
    msg.assign(body, body + size);
  }
};

// By request id.
using InferenceResponseBatch = std::map<std::string, std::shared_ptr<InferenceResponse>>;

}  // namespace torchserve
