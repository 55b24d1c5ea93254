// A failure on purpose, to test what a server does when its engine dies: OCTAVO_FAULT=KIND@STEP in the environment of the
// process that makes a Program. In that program's step STEP, counted from 1, a phase of its own or the caller fails:
//
//   segv@STEP    a kernel writes to address 0
//   abort@STEP   a kernel calls abort()
//   hang@STEP    a kernel never ends
//   throw@STEP   Program::run throws std::runtime_error
//
// Without the variable a step pays one comparison. No request can reach this.
#pragma once
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "program.h"

namespace octavo {

class Fault {
 public:
  // Throws std::invalid_argument if the variable is malformed.
  Fault() {
    const char *text = std::getenv("OCTAVO_FAULT");
    if (!text || !*text) return;
    const std::string spec = text;
    const size_t at = spec.find('@');
    kind_ = spec.substr(0, at);
    const bool known = kind_ == "segv" || kind_ == "abort" || kind_ == "hang" || kind_ == "throw";
    step_ = at == std::string::npos ? 0 : std::atoll(text + at + 1);
    if (!known || step_ < 1) throw std::invalid_argument("OCTAVO_FAULT is " + spec + "; it must be {segv|abort|hang|throw}@STEP");
    std::fprintf(stderr, "octavo: OCTAVO_FAULT is %s: this engine will fail on purpose\n", text);
  }
  // Counts a step; adds a phase to this one, or throws, if it is the one.
  void count_step(PhaseList &phases) {
    if (step_ == 0 || ++steps_ != step_) return;
    if (kind_ == "throw") throw std::runtime_error("a fault on purpose");
    phases.add({strike, this, 1});
  }

 private:
  static void strike(const void *fault, const void *, int, void *) {
    const std::string &kind = static_cast<const Fault *>(fault)->kind_;
    std::atomic<bool> for_ever{true};
    while (kind == "hang" && for_ever) continue;
    if (kind == "abort") std::abort();
    volatile int *volatile nowhere = nullptr;
    *nowhere = 0;
  }

  std::string kind_;
  int64_t step_ = 0, steps_ = 0;  // step_ 0: none
};

}  // namespace octavo
