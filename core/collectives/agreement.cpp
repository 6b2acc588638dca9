#include "collectives/agreement.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "api/error.h"
#include "collectives/hash.h"

namespace cccl {
namespace {

std::string compare(const std::vector<Signature>& all, std::size_t field) {
  std::string text = std::string(Signature::kFields[field]) + ": ";
  for (std::size_t rank = 0; rank < all.size(); ++rank)
    text += (rank ? ", " : "") + std::string("rank ") + std::to_string(rank) + " has " +
            all[rank].fields[field];
  return text;
}

void compare_all(const std::vector<Signature>& all, std::uint64_t sequence) {
  std::string differences;
  for (std::size_t field = 0; field < Signature::kCount; ++field)
    for (const auto& other : all)
      if (std::memcmp(other.fields[field], all[0].fields[field], Signature::kFieldBytes) != 0) {
        differences += (differences.empty() ? "" : "; ") + compare(all, field);
        break;
      }
  if (!differences.empty())
    throw MismatchError("ranks called collective number " + std::to_string(sequence) +
                        " differently: " + differences +
                        ". Make the calls and the configuration equal on all ranks.");
}

}  // namespace

void Signature::set(const std::string& field, const std::string& value) {
  for (std::size_t i = 0; i < kCount; ++i) {
    if (field != kFields[i]) continue;
    std::string text = value;
    if (text.size() >= kFieldBytes) {  // too long to show whole: its hash still compares all of it
      std::uint64_t hash = 0;
      for (const char c : text) hash = mix(hash + static_cast<unsigned char>(c) + 1);
      text = text.substr(0, kFieldBytes - 26) + "... #" + std::to_string(hash);
    }
    std::memcpy(fields[i], text.data(), std::min(text.size(), kFieldBytes - 1));
    return;
  }
  throw Error("no such field: " + field);
}

std::uint64_t Signature::digest() const {
  std::uint64_t hash = 0;
  for (const auto& field : fields)
    for (std::size_t i = 0; i < kFieldBytes; i += 8) {
      std::uint64_t word;
      std::memcpy(&word, field + i, sizeof word);
      hash = mix(hash * 0x9E3779B97F4A7C15u + word);
    }
  return hash;
}

std::uint32_t tag_of(std::uint64_t sequence, std::uint64_t digest) {
  return static_cast<std::uint32_t>(mix(digest + 0x9E3779B97F4A7C15u * (sequence + 1)) >> 33);
}

void agree(const Signature& mine, std::uint64_t sequence, Transport& transport, Queue& queue,
           Seconds deadline, std::vector<Signature>& all) {
  const int me = transport.rank(), size = transport.size();
  all.assign(static_cast<std::size_t>(size), mine);
  if (transport.exchange(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)),
                         sequence, deadline))
    return compare_all(all, sequence);
  std::vector<Transfer> transfers;
  const auto tag = tag_of(sequence, 0);
  for (int d = 1; d < size; ++d) {
    const int from = (me + size - d) % size, to = (me + d) % size;
    transfers.push_back({Direction::kReceive, reinterpret_cast<std::byte*>(&all[from]),
                         sizeof(Signature), from, tag});
    transfers.push_back(
        {Direction::kSend, reinterpret_cast<std::byte*>(&all[me]), sizeof(Signature), to, tag});
  }
  transport.post(transfers, queue);
  std::vector<Request> requests;
  for (const auto& transfer : transfers) requests.push_back(transfer.request);
  transport.wait(requests, queue, deadline);
  compare_all(all, sequence);
}

}  // namespace cccl
