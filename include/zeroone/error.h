// What the library throws. It never prints and never aborts.
#pragma once

#include <stdexcept>
#include <string>

namespace zeroone {

/// Base of everything thrown by zeroone. After any of these the state is that of before the call.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The caller's own input is wrong: a negative learning rate, a null pointer, a wrong size.
class InvalidArgument : public Error {
 public:
  using Error::Error;
};

/// Ranks differ in layout, settings, step or learning rate, or another rank reported an error.
/// Thrown on every rank that took part.
class DisagreementError : public Error {
 public:
  using Error::Error;
};

/// A collective failed or ran into its timeout.
class CommunicationError : public Error {
 public:
  using Error::Error;
};

}  // namespace zeroone
