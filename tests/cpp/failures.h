// What tests of failures share: a transport that they bend, and what must be seen of errors.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "api/transport.h"
#include "support.h"

namespace cccl::testing {

template <class Expected>
bool is(const std::exception_ptr& error) {
  if (!error) return false;
  try {
    std::rethrow_exception(error);
  } catch (const Expected&) {
    return true;
  } catch (...) {
    return false;
  }
}

inline std::string message_of(const std::exception_ptr& error) {
  if (!error) return "no error";
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& failure) {
    return failure.what();
  }
}

inline bool all_nan(const Array& array) {
  return std::ranges::all_of(array.values(), [](double value) { return std::isnan(value); });
}

inline void expect_typed_errors_and_nan(const Group::Round& round,
                                        const std::vector<std::exception_ptr>& errors) {
  for (std::size_t rank = 0; rank < errors.size(); ++rank) {
    EXPECT_TRUE(is<Error>(errors[rank])) << "rank " << rank << ": " << message_of(errors[rank]);
    EXPECT_TRUE(all_nan(round.out[rank])) << "rank " << rank << " has an output that looks whole";
  }
}

// What it does not replace goes to the transport behind it.
class Bent final : public Transport {
 public:
  struct Hooks {
    std::function<void(const Transfer&)> received = [](const Transfer&) {};
    std::function<void(std::span<Transfer>)> before_post = [](std::span<Transfer>) {};
    std::function<void()> after_sizes = [] {};
    std::function<void()> before_abort = [] {};
  };

  Bent(std::shared_ptr<Transport> inner, Hooks hooks)
      : inner_(std::move(inner)), hooks_(std::move(hooks)) {}

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  DeviceKind device() const override { return inner_->device(); }
  std::size_t receive_ahead() const override { return inner_->receive_ahead(); }

  void post(std::span<Transfer> transfers, Queue& queue) override {
    hooks_.before_post(transfers);
    inner_->post(transfers, queue);
    for (const auto& transfer : transfers) posted_.emplace(transfer.request, transfer);
  }

  void post_sizes(std::span<Transfer> sizes, Queue& queue) override {
    inner_->post_sizes(sizes, queue);
    for (const auto& size : sizes) posted_.emplace(size.request, size);
    hooks_.after_sizes();
  }

  void wait(std::span<const Request> requests, Queue& queue, Seconds deadline) override {
    inner_->wait(requests, queue, deadline);
    for (const auto request : requests) {
      const auto& transfer = posted_.at(request);
      if (transfer.direction == Direction::kReceive) hooks_.received(transfer);
      posted_.erase(request);
    }
  }

  void check() override { inner_->check(); }

  void abort(const std::string& reason) noexcept override {
    hooks_.before_abort();
    inner_->abort(reason);
  }

 private:
  std::shared_ptr<Transport> inner_;
  Hooks hooks_;
  std::map<Request, Transfer> posted_;
};

}  // namespace cccl::testing
