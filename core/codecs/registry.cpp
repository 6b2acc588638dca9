#include <algorithm>

#include "api/codec.h"

namespace cccl {

#define CCCLIB_CODEC(folder) std::span<const CodecEntry> folder##_codecs();
#include "codec_list.inc"
#undef CCCLIB_CODEC

// Of the folders that have a .cu file in this build.
#define CCCLIB_CODEC(folder) \
  std::shared_ptr<const Codec> folder##_on_cuda(std::shared_ptr<const Codec> codec);
#include "device_codec_list.inc"
#undef CCCLIB_CODEC

namespace {

[[maybe_unused]] bool holds(std::span<const CodecEntry> entries, const Codec& codec) {
  return std::ranges::any_of(entries,
                             [&](const auto& entry) { return entry.info.id == codec.info().id; });
}

}  // namespace

std::shared_ptr<const Codec> codec_on(DeviceKind kind, std::shared_ptr<const Codec> codec) {
  if (kind == DeviceKind::kCpu) return codec;
#define CCCLIB_CODEC(folder) \
  if (holds(folder##_codecs(), *codec)) return folder##_on_cuda(std::move(codec));
#include "device_codec_list.inc"
#undef CCCLIB_CODEC
  constexpr bool kHasCuda = 0
#define CCCLIB_CODEC(folder) +1
#include "device_codec_list.inc"
#undef CCCLIB_CODEC
      ;
  throw UnsupportedError(
      std::string("codec '") + codec->info().name +
      (kHasCuda ? "' runs on CPUs only" : "' has no CUDA build; rebuild with CCCLIB_CUDA=ON"));
}

std::vector<const CodecEntry*> registered_codecs() {
  std::vector<const CodecEntry*> all;
#define CCCLIB_CODEC(folder) \
  for (const auto& entry : folder##_codecs()) all.push_back(&entry);
#include "codec_list.inc"
#undef CCCLIB_CODEC
  return all;
}

std::shared_ptr<const Codec> make_codec(const std::string& name, const Options& options) {
  if (const auto open = name.find('('); open != name.npos && name.ends_with(')')) {
    auto nested = options;
    const auto inner = name.substr(open + 1, name.size() - open - 2);
    if (!nested.emplace("inner", inner).second)
      throw ConfigError("codec '" + name + "' names its inner codec; leave the option 'inner' out");
    return make_codec(name.substr(0, open), nested);
  }
  std::string known;
  for (const auto* entry : registered_codecs()) {
    const auto& aliases = entry->info.aliases;
    if (name == entry->info.name || std::ranges::find(aliases, name) != aliases.end()) {
      OptionReader reader(entry->info.name, options);
      auto codec = entry->make(entry->info, reader);
      reader.finish();
      return codec;
    }
    known += (known.empty() ? "" : ", ") + std::string(entry->info.name);
  }
  throw ConfigError("unknown codec '" + name + "'; registered: " + known);
}

std::shared_ptr<const Codec> codec_of(const PayloadHeader& header) {
  for (const auto* entry : registered_codecs()) {
    if (entry->info.id != header.codec) continue;
    std::shared_ptr<const Codec> codec = entry->reopen(entry->info, header);
    const auto expected = codec->max_encoded_bytes(header.count, DType{header.dtype});
    if (entry->info.fixed_size && sizeof header + header.body_bytes != expected)
      throw CorruptPayloadError(codec->spec() + " payload of " + std::to_string(header.count) +
                                " values has " + std::to_string(header.body_bytes) +
                                " bytes behind its header instead of " +
                                std::to_string(expected - sizeof header));
    return codec;
  }
  throw CorruptPayloadError("payload was made by codec number " + std::to_string(header.codec) +
                            ", which this build does not have");
}

const OptionValue* OptionReader::take(const std::string& key) {
  known_.insert(key);
  const auto found = options_.find(key);
  return found == options_.end() ? nullptr : &found->second;
}

std::int64_t OptionReader::integer(const std::string& key, std::int64_t fallback) {
  const auto* value = take(key);
  if (!value) return fallback;
  if (const auto* number = std::get_if<std::int64_t>(value)) return *number;
  refuse(key, "an integer");
}

double OptionReader::number(const std::string& key, double fallback) {
  const auto* value = take(key);
  if (!value) return fallback;
  if (const auto* number = std::get_if<double>(value)) return *number;
  if (const auto* number = std::get_if<std::int64_t>(value)) return static_cast<double>(*number);
  refuse(key, "a number");
}

std::shared_ptr<const Codec> OptionReader::inner(const std::string& key,
                                                 const std::string& fallback) {
  const auto* value = take(key);
  const auto* name = value ? std::get_if<std::string>(value) : &fallback;
  if (!name) refuse(key, "a codec's name");
  Options rest;
  for (const auto& [option, content] : options_)
    if (known_.insert(option).second) rest[option] = content;
  return make_codec(*name, rest);
}

std::string OptionReader::choice(const std::string& key,
                                 std::span<const std::string_view> allowed) {
  const auto* value = take(key);
  if (!value) return std::string(allowed.front());
  const auto* text = std::get_if<std::string>(value);
  if (text && std::ranges::find(allowed, *text) != allowed.end()) return *text;
  std::string list;
  for (auto word : allowed) list += (list.empty() ? "" : " or ") + std::string(word);
  refuse(key, list);
}

void OptionReader::refuse(const std::string& key, const std::string& allowed) const {
  struct Show {
    std::string operator()(bool v) const { return v ? "true" : "false"; }
    std::string operator()(const std::string& v) const { return "'" + v + "'"; }
    std::string operator()(std::int64_t v) const { return std::to_string(v); }
    std::string operator()(double v) const { return std::to_string(v); }
  };
  throw ConfigError("codec '" + codec_ + "': " + key + " = " +
                    std::visit(Show{}, options_.at(key)) + "; allowed: " + allowed);
}

void OptionReader::finish() const {
  std::string known;
  for (const auto& key : known_) known += (known.empty() ? "" : ", ") + key;
  for (const auto& [key, value] : options_)
    if (!known_.contains(key))
      throw ConfigError("codec '" + codec_ + "' has no option '" + key +
                        "'; it takes: " + (known.empty() ? "none" : known));
}

}  // namespace cccl
