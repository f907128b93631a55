// TS_LOG(level, value) and TS_LOGF(level, "{} and {}", first, second): lines of the model's log.
#pragma once

#ifndef FMT_HEADER_ONLY
#define FMT_HEADER_ONLY  // else every handler would have to be linked with libfmt
#endif
#if !__has_include(<fmt/format.h>)
#error "fmt/format.h is missing. Newer torch wheels bring it; for others install it (Debian: libfmt-dev)."
#endif
#include <fmt/format.h>

#include <cstdio>
#include <exception>
#include <string>

#define TS_LOG(level, ...)                                                                       \
  ::torchserve::Logger::Log(::torchserve::LogLevel::level, __FILE__, __LINE__, __func__, __VA_ARGS__)
#define TS_LOGF(level, ...) TS_LOG(level, __VA_ARGS__)

namespace torchserve {

enum LogLevel { TRACE = 0, DEBUG, INFO, WARN, ERROR, FATAL };

class Logger {
 public:
  using Sink = void (*)(int level, const char* file, unsigned line, const char* function, const char* text);

  // Writes to the worker's log. Lines go to standard error until the worker sets it.
  static inline Sink sink = nullptr;

  template <typename Value>
  static void Log(LogLevel level, const char* file, unsigned line, const char* function, const Value& value) {
    Write(level, file, line, function, fmt::format("{}", value));
  }

  // A pattern that does not fit its values is logged unformatted: a log line must not fail a request.
  template <typename First, typename... Others>
  static void Log(LogLevel level, const char* file, unsigned line, const char* function,
                  fmt::string_view pattern, const First& first, const Others&... others) {
    std::string text;
    try {
      text = fmt::vformat(pattern, fmt::make_format_args(first, others...));
    } catch (const std::exception& error) {
      text = fmt::format("{} (the pattern does not fit its values: {})",
                         std::string(pattern.data(), pattern.size()), error.what());
    }
    Write(level, file, line, function, text);
  }

 private:
  static void Write(LogLevel level, const char* file, unsigned line, const char* function,
                    const std::string& text) {
    if (sink != nullptr) {
      sink(level, file, line, function, text.c_str());
    } else {
      std::fprintf(stderr, "%s:%u] %s %s\n", file, line, function, text.c_str());
    }
  }
};

}  // namespace torchserve
