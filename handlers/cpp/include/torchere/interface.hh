// The C interface by which a worker of torchere loads and runs a handler; its counterpart is
// handlers/cpp/handler.py. base_handler.hh includes it, so that every handler's library exports it. No
// exception leaves a function: it becomes an error text.
#pragma once

#include <torch/version.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "src/backends/handler/base_handler.hh"

#define TORCHERE_C_INTERFACE extern "C" inline __attribute__((used, visibility("default")))

namespace torchere {

// Values cross the interface as pieces: byte strings in an order that both sides know. Numbers are decimal
// text.
struct Piece {
  const char* data;
  std::size_t size;
};

// Reads the pieces of the worker, which are concatenated.
class Pieces {
 public:
  Pieces(const char* data, const std::uint64_t* sizes) : data_(data), sizes_(sizes) {}

  std::string Text() {
    const Piece piece = Next();
    return {piece.data, piece.size};
  }

  int Number() { return std::stoi(Text()); }

  std::vector<char> Bytes() {
    const Piece piece = Next();
    return {piece.data, piece.data + piece.size};
  }

 private:
  Piece Next() {
    const Piece piece{data_, static_cast<std::size_t>(*sizes_++)};
    data_ += piece.size;
    return piece;
  }

  const char* data_;
  const std::uint64_t* sizes_;
};

// Runs a step and returns the text of its exception; empty if it throws none.
template <typename Step>
std::string ErrorOf(Step step) {
  try {
    step();
    return {};
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::bad_alloc&) {
    return "out of memory (std::bad_alloc)";
  } catch (const std::exception& error) {
    return *error.what() ? error.what() : "an exception without a text";
  } catch (...) {
    return "an exception that is no std::exception";
  }
}

// A handler with its model. One thread at a time.
class Session {
 public:
  // The result of the last call, valid until the next one.
  std::vector<Piece> result;

  // Facts: folder, model, GPU, handler, batch size, whether large pictures are refused, manifest.
  void Open(torchserve::BaseHandler* (*allocate)(), void (*release)(torchserve::BaseHandler*), Pieces facts) {
    Add(ErrorOf([&] {
      handler_.reset(allocate(), release);
      if (!handler_) {
        throw std::runtime_error("its allocator returned no handler");
      }
      const std::string folder = facts.Text(), model = facts.Text();
      const int gpu = facts.Number();
      const std::string name = facts.Text();
      const int batch_size = facts.Number();
      const bool limits_pictures = facts.Number() != 0;
      auto manifest = std::make_shared<torchserve::Manifest>();
      manifest->Read(torchserve::Json::Parse(facts.Text()));
      auto request = std::make_shared<torchserve::LoadModelRequest>(folder, model, gpu, name, "", batch_size,
                                                                    limits_pictures);
      handler_->Initialize(folder, manifest);
      std::tie(model_, device_) = handler_->LoadModel(request);
    }));
  }

  // Result: an error text, the seconds of three stages; then for each request the code of its response
  // (empty: there is none), the body, the number of headers, their names and values.
  void Run(Pieces batch) {
    result.clear();
    texts_.clear();
    auto requests = std::make_shared<torchserve::InferenceRequestBatch>();
    responses_ = std::make_shared<torchserve::InferenceResponseBatch>();
    std::vector<std::string> ids;
    Add(ErrorOf([&] {
      for (int left = batch.Number(); left > 0; --left) {
        requests->push_back(ReadRequest(batch));
        ids.push_back(requests->back().request_id);
      }
      handler_->Handle(model_, device_, requests, responses_);
    }));
    for (const double seconds : handler_->StageSeconds()) {
      Add(std::to_string(seconds));
    }
    for (const auto& id : ids) {
      AddResponse(id);
    }
  }

 private:
  static torchserve::InferenceRequest ReadRequest(Pieces& from) {
    torchserve::InferenceRequest request;
    request.request_id = from.Text();
    for (int left = from.Number(); left > 0; --left) {
      const std::string name = from.Text();
      request.headers[name] = from.Text();
    }
    for (int left = from.Number(); left > 0; --left) {
      const std::string name = from.Text();
      request.parameters[name] = from.Bytes();
    }
    return request;
  }

  void AddResponse(const std::string& id) {
    const auto found = responses_->find(id);
    if (found == responses_->end() || !found->second) {
      Add("");
      return;
    }
    const torchserve::InferenceResponse& response = *found->second;
    Add(std::to_string(response.code));
    result.push_back({response.msg.data(), response.msg.size()});
    Add(std::to_string(response.headers.size()));
    for (const auto& [name, value] : response.headers) {
      result.push_back({name.data(), name.size()});
      result.push_back({value.data(), value.size()});
    }
  }

  void Add(std::string text) {
    texts_.push_back(std::move(text));
    result.push_back({texts_.back().data(), texts_.back().size()});
  }

  std::shared_ptr<torchserve::BaseHandler> handler_;
  std::shared_ptr<void> model_;
  std::shared_ptr<torch::Device> device_;
  std::shared_ptr<torchserve::InferenceResponseBatch> responses_;
  std::deque<std::string> texts_;  // a deque, because it does not move its texts
};

}  // namespace torchere

// The worker searches the library's file for this text before it opens the library.
TORCHERE_C_INTERFACE const char* torchere_handler_stamp() {
  return "torchere handler, interface 1, torch " TORCH_VERSION;
}

// Sets the functions that take log lines and metrics of all handlers of the library.
TORCHERE_C_INTERFACE void torchere_handler_connect(torchserve::Logger::Sink log,
                                                   torchserve::MetricSink::Knows knows,
                                                   torchserve::MetricSink::Report report) {
  torchserve::Logger::sink = log;
  torchserve::MetricsRegistry::GetMetricsCacheInstance()->sink = {knows, report};
}

// Creates a handler by its allocator and deleter, and loads its model. The result's first piece is an error
// text; a session with an error can only be closed.
TORCHERE_C_INTERFACE void* torchere_handler_open(torchserve::BaseHandler* (*allocate)(),
                                                 void (*release)(torchserve::BaseHandler*),
                                                 const char* facts, const std::uint64_t* sizes) {
  auto* session = new torchere::Session;
  session->Open(allocate, release, torchere::Pieces(facts, sizes));
  return session;
}

// Runs one batch: the number of requests; for each its id, the number of its headers, their names and values,
// the number of its parameters, their names and values.
TORCHERE_C_INTERFACE void torchere_handler_run(void* session, const char* batch, const std::uint64_t* sizes) {
  static_cast<torchere::Session*>(session)->Run(torchere::Pieces(batch, sizes));
}

// Returns the pieces of the last call's result, valid until the next call.

TORCHERE_C_INTERFACE const torchere::Piece* torchere_handler_result(void* session, std::size_t* count) {
  const auto& result = static_cast<torchere::Session*>(session)->result;
  *count = result.size();
  return result.data();
}

TORCHERE_C_INTERFACE void torchere_handler_close(void* session) {
  torchere::ErrorOf([&] { delete static_cast<torchere::Session*>(session); });
}
