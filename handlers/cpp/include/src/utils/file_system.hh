// Files as streams and as bytes.
#pragma once

#include <fstream>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <string>

namespace torchserve {

class FileSystem {
 public:
  // Throws std::invalid_argument if the file can't be read.
  static std::unique_ptr<std::istream> GetStream(const std::string& path) {
    auto stream = std::make_unique<std::ifstream>(path, std::ios::binary);
    if (!stream->good()) {
      throw std::invalid_argument("can't read the file " + path);
    }
    return stream;
  }

  // Throws as `GetStream`.
  static std::string LoadBytesFromFile(const std::string& path) {
    auto stream = GetStream(path);
    return {std::istreambuf_iterator<char>(*stream), std::istreambuf_iterator<char>()};
  }
};

}  // namespace torchserve
