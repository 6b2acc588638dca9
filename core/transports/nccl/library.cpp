#include "transports/nccl/library.h"

#include <dlfcn.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "api/error.h"
#include "transports/nccl/nccl.h"

namespace cccl::nccl {
namespace {

namespace fs = std::filesystem;

constexpr const char* kName = "libnccl.so.2";

// Files of that name which the process has mapped.
std::set<std::string> mapped_copies() {
  std::set<std::string> paths;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    const auto slash = line.find('/');
    if (slash == std::string::npos) continue;
    const fs::path path = line.substr(slash);
    if (path.filename().string().starts_with("libnccl.so")) paths.insert(path.string());
  }
  return paths;
}

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

// What the user names, in the order in which it is tried.
std::vector<std::string> candidates() {
  if (const auto path = environment("CCCL_NCCL_PATH"); !path.empty()) return {path};
  std::vector<std::string> paths;
  if (const auto home = environment("NCCL_HOME"); !home.empty())
    for (const char* folder : {"lib", "lib64", "lib/x86_64-linux-gnu", "."}) {
      const auto path = fs::path(home) / folder / kName;
      if (fs::exists(path)) paths.push_back(path.string());
    }
  paths.push_back(kName);
  return paths;
}

void* open(std::string& path) {
  const auto copies = mapped_copies();
  const auto named = environment("CCCL_NCCL_PATH");
  std::error_code ignored;
  if (copies.size() > 1) {
    std::string list;
    for (const auto& copy : copies) list += (list.empty() ? "" : ", ") + copy;
    throw UnsupportedError("this process has loaded two NCCL libraries: " + list +
                           ". They would not know of each other: remove one, or preload the right "
                           "one with LD_PRELOAD.");
  }
  if (copies.size() == 1) {
    path = *copies.begin();
    if (!named.empty() && !fs::equivalent(named, path, ignored))
      throw UnsupportedError("CCCL_NCCL_PATH is " + named + ", but this process has loaded " +
                             path + " already (torch's own?). Unset it, or import cccl first.");
    if (void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) return handle;
  }
  std::string tried;
  for (const auto& candidate : candidates()) {
    path = candidate;
    if (void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) return handle;
    tried += std::string("\n  ") + dlerror();
  }
  throw UnsupportedError(
      "no NCCL library (libnccl.so.2) was found. Install one (pip install nvidia-nccl-cu13, or "
      "torch with CUDA), or set CCCL_NCCL_PATH to the file or NCCL_HOME to its folder. Tried:" +
      tried);
}

template <class Function>
void find(void* handle, const std::string& path, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(handle, name));
  if (!function) throw UnsupportedError(path + " has no function " + name);
}

std::unique_ptr<Library> load() {
  auto library = std::make_unique<Library>();
  auto& path = library->path;
  void* const handle = open(path);
  Result (*get_version)(int*);
  find(handle, path, "ncclGetVersion", get_version);
  get_version(&library->version);
  if (library->version < kOldest)
    throw UnsupportedError(path + " is NCCL " + text_of_version(library->version) +
                           "; needed is 2.18.0 or later. Install a later one, or set "
                           "CCCL_NCCL_PATH to it.");
  find(handle, path, "ncclGetUniqueId", library->get_unique_id);
  find(handle, path, "ncclCommInitRankConfig", library->init);
  find(handle, path, "ncclCommSplit", library->split);
  find(handle, path, "ncclCommGetAsyncError", library->async_error);
  find(handle, path, "ncclCommAbort", library->abort);
  find(handle, path, "ncclCommDestroy", library->destroy);
  find(handle, path, "ncclSend", library->send);
  find(handle, path, "ncclRecv", library->receive);
  find(handle, path, "ncclGroupStart", library->group_start);
  find(handle, path, "ncclGroupEnd", library->group_end);
  find(handle, path, "ncclGetErrorString", library->error_text);
  find(handle, path, "ncclGetLastError", library->last_error);
  return library;
}

}  // namespace

const Library& library() {
  static std::mutex mutex;
  static std::unique_ptr<Library> loaded;  // none after a failure: the user may mend it
  const std::lock_guard lock(mutex);
  if (!loaded) loaded = load();
  return *loaded;
}

}  // namespace cccl::nccl
