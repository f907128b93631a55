// JSON files of an archive: names of classes, settings.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "src/utils/file_system.hh"

namespace torchserve {

// One value. Each method throws std::invalid_argument if the value is not of the kind that is asked for.
class Json {
 public:
  static Json ParseJsonFile(const std::string& filename) {
    try {
      return Parse(FileSystem::LoadBytesFromFile(filename));
    } catch (const std::invalid_argument& error) {
      throw std::invalid_argument(filename + ": " + error.what());
    }
  }

  static Json Parse(const std::string& text);

  bool HasKey(const std::string& key) const { return Find(key) != nullptr; }

  Json GetValue(const std::string& key) const {
    const Json* found = Find(key);
    return found != nullptr ? *found : Fail("no key '" + key + "'");
  }

  Json GetValue(const unsigned long index) const {
    return index < items_.size() ? items_[index].second : Fail("no item " + std::to_string(index));
  }

  std::string AsString() const { return kind_ == Kind::kText ? text_ : Fail("not a text: " + text_).text_; }

  int AsInt() const {
    return std::stoi(kind_ == Kind::kNumber ? text_ : Fail("not a number: " + text_).text_);
  }

 private:
  enum class Kind { kText, kNumber, kWord, kList, kObject };
  class Parser;

  [[noreturn]] static Json Fail(const std::string& problem) {
    throw std::invalid_argument("JSON: " + problem);
  }

  const Json* Find(const std::string& key) const {
    for (const auto& [name, value] : items_) {
      if (kind_ == Kind::kObject && name == key) {
        return &value;
      }
    }
    return nullptr;
  }

  Kind kind_ = Kind::kWord;
  std::string text_;  // a text, decoded; a number, true, false or null as it is written
  std::vector<std::pair<std::string, Json>> items_;  // members of an object, or nameless list elements
};

class Json::Parser {
 public:
  explicit Parser(const std::string& text) : text_(text) {}

  Json Whole() {
    Json value = Value(0);
    if (Peek() != '\0' || at_ < text_.size()) {
      Fail("more text behind the value, at byte " + std::to_string(at_));
    }
    return value;
  }

 private:
  static constexpr int kMaxDepth = 200;

  Json Value(int depth) {
    if (depth > kMaxDepth) {
      Fail("nested too deeply");
    }
    Json value;
    switch (Peek()) {
      case '{':
        value.kind_ = Kind::kObject;
        Items('}', value, depth);
        break;
      case '[':
        value.kind_ = Kind::kList;
        Items(']', value, depth);
        break;
      case '"':
        value.kind_ = Kind::kText;
        value.text_ = Text();
        break;
      default:
        value.text_ = Word();
        value.kind_ = value.text_[0] == '-' || IsDigit(value.text_[0]) ? Kind::kNumber : Kind::kWord;
    }
    return value;
  }

  void Items(char end, Json& value, int depth) {
    ++at_;
    for (bool first = true; Peek() != end; first = false) {
      if (!first) {
        Expect(',');
      }
      std::string name;
      if (value.kind_ == Kind::kObject) {
        Peek();
        name = Text();
        Expect(':');
      }
      value.items_.emplace_back(name, Value(depth + 1));
    }
    ++at_;
  }

  std::string Word() {
    const std::size_t begin = at_;
    static const std::string kEnds = " \t\n\v\f\r,:]}[{\"";
    at_ = std::min(text_.find_first_of(kEnds, at_), text_.size());
    return at_ > begin ? text_.substr(begin, at_ - begin) : Unexpected();
  }

  std::string Text() {
    if (at_ >= text_.size() || text_[at_] != '"') {
      Unexpected();
    }
    std::string decoded;
    for (++at_; at_ < text_.size() && text_[at_] != '"'; ++at_) {
      if (text_[at_] == '\\') {
        Escape(decoded);
      } else {
        decoded += text_[at_];
      }
    }
    Expect('"');
    return decoded;
  }

  // Appends the character that the escape at `at_` stands for; ends on the last byte of the escape.
  void Escape(std::string& decoded) {
    static const std::string kNames = "bfnrt", kValues = "\b\f\n\r\t";
    const char name = ++at_ < text_.size() ? text_[at_] : '\0';
    if (name == 'u') {
      std::uint32_t code = Hex();
      if (code >= 0xD800 && code < 0xDC00 && text_.compare(at_ + 1, 2, "\\u") == 0) {
        at_ += 2;
        code = 0x10000 + ((code - 0xD800) << 10) + (Hex() - 0xDC00);
      }
      AppendUtf8(code, decoded);
    } else {
      const std::size_t place = kNames.find(name);
      decoded += place == std::string::npos ? name : kValues[place];
    }
  }

  std::uint32_t Hex() {
    const std::string digits = text_.substr(std::min(at_ + 1, text_.size()), 4);
    at_ += 4;
    if (digits.size() != 4 || digits.find_first_not_of("0123456789abcdefABCDEF") != std::string::npos) {
      Fail("\\u" + digits + " is no character");
    }
    return static_cast<std::uint32_t>(std::strtoul(digits.c_str(), nullptr, 16));
  }

  static bool IsDigit(char c) { return c >= '0' && c <= '9'; }

  static void AppendUtf8(std::uint32_t code, std::string& text) {
    const int more = code < 0x80 ? 0 : code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
    static constexpr unsigned char kLead[] = {0x00, 0xC0, 0xE0, 0xF0};
    text += static_cast<char>(kLead[more] | (code >> (6 * more)));
    for (int left = more - 1; left >= 0; --left) {
      text += static_cast<char>(0x80 | ((code >> (6 * left)) & 0x3F));
    }
  }

  // Skips blanks, and returns the next character; '\0' at the end.
  char Peek() {
    while (at_ < text_.size() && (text_[at_] == ' ' || (text_[at_] >= '\t' && text_[at_] <= '\r'))) {
      ++at_;
    }
    return at_ < text_.size() ? text_[at_] : '\0';
  }

  void Expect(char wanted) {
    if (Peek() != wanted) {
      Unexpected();
    }
    ++at_;
  }

  [[noreturn]] std::string Unexpected() const {
    Fail(at_ < text_.size() ? "unexpected '" + text_.substr(at_, 1) + "' at byte " + std::to_string(at_)
                            : "the text ends too early");
  }

  const std::string& text_;
  std::size_t at_ = 0;
};

inline Json Json::Parse(const std::string& text) { return Parser(text).Whole(); }

}  // namespace torchserve
