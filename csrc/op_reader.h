// Reads the integers of an encoded program; the structs that it fills are generated from the operation schema.
#pragma once
#include <bit>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <vector>

namespace octavo {

using TensorId = int;
using WeightId = int;
inline constexpr int kNone = -1;

class Reader {
 public:
  explicit Reader(std::span<const int64_t> words) : words_(words) {}
  bool at_end() const { return at_ == words_.size(); }
  int64_t integer() {
    if (at_end()) throw std::invalid_argument("program is truncated");
    return words_[at_++];
  }
  bool boolean() { return integer() != 0; }
  double real() { return std::bit_cast<double>(integer()); }
  TensorId tensor() { return static_cast<TensorId>(integer()); }
  WeightId weight() { return static_cast<WeightId>(integer()); }
  template <class E>
  E choice() {
    return static_cast<E>(integer());
  }
  template <class T>
  std::vector<T> list(T (Reader::*item)()) {
    int64_t n = integer();
    if (n < 0 || static_cast<size_t>(n) > words_.size() - at_) throw std::invalid_argument("program is truncated");
    std::vector<T> items;
    for (int64_t i = 0; i < n; i++) items.push_back((this->*item)());
    return items;
  }

 private:
  std::span<const int64_t> words_;
  size_t at_ = 0;
};

}  // namespace octavo
