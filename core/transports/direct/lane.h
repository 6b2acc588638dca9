// By which notes ranks tell each other how far they are, where payloads are read in their sender's
// memory. No device, no memory: what is to be set, and what to be waited for.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "api/transport.h"

namespace cccl::direct {

enum class Done : std::uint8_t { kWritten, kRead };

// `owner` has it: all that `from` sends it up to that group can be read, or has been read by it.
struct Note {
  int owner;
  Done done;
  int from;
  std::uint64_t group;
};

// Of one queue of a rank, which runs in order: the number of a group says that all before it are
// done, too.
class Lane {
 public:
  explicit Lane(int rank) : rank_(rank) {}

  // What is to be sent can be read behind this, and what was waited for has been.
  void post(std::span<Transfer> transfers) {
    ++group_;
    for (auto& t : transfers) {
      const bool sends = t.direction == Direction::kSend;
      t.request = group_ << 8 | (sends ? kSent : 0) | static_cast<Request>(t.peer);
      if (sends)
        add({t.peer, Done::kWritten, rank_, group_}, to_set_);
      else
        ++unread_[{group_, t.peer}];
    }
    finish();
  }

  // What was waited for has been read.
  void finish() {
    for (const auto& note : std::exchange(read_, {})) add(note, to_set_);
  }

  // What to wait for before what these receive is read, or what they sent is written anew.
  std::vector<Note> wait(std::span<const Request> requests) {
    std::vector<Note> notes;
    for (const auto request : requests) {
      const std::uint64_t group = request >> 8;
      const int peer = static_cast<int>(request & (kSent - 1));
      const bool sent = request & kSent;
      add({rank_, sent ? Done::kRead : Done::kWritten, peer, group}, notes);
      if (sent) continue;
      const auto unread = unread_.find({group, peer});
      if (--unread->second > 0) continue;
      unread_.erase(unread);
      add({peer, Done::kRead, rank_, group}, read_);
    }
    return notes;
  }

  bool has_to_set() const { return !to_set_.empty(); }
  std::vector<Note> take_to_set() { return std::exchange(to_set_, {}); }

 private:
  static constexpr Request kSent = 1 << 7;  // in a request: its group, this, and the peer

  // The latest of each kind.
  static void add(const Note& note, std::vector<Note>& notes) {
    const auto known = std::ranges::find_if(notes, [&](const Note& n) {
      return n.owner == note.owner && n.done == note.done && n.from == note.from;
    });
    if (known == notes.end())
      notes.push_back(note);
    else
      known->group = std::max(known->group, note.group);
  }

  const int rank_;
  std::uint64_t group_ = 0;
  std::map<std::pair<std::uint64_t, int>, int> unread_;  // receives of a group from a peer
  std::vector<Note> read_;                               // to be told with the next group
  std::vector<Note> to_set_;
};

}  // namespace cccl::direct
