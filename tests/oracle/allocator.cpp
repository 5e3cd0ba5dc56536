// The oracle: torch's own CPU allocator, with a count of every byte beside it.
//
// It stands below the dispatcher, so it also sees what kernels allocate for themselves. Each
// thread says on which device it works (-1: not counted); a block stays with the device that
// allocated it, whichever thread frees it. Only c10 is needed, so this compiles in seconds, and
// Python talks to it through ctypes.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <unordered_map>

namespace {

constexpr int kDevices = 64;

struct Device {
  int64_t current = 0;
  int64_t peak = 0;
};

struct Block {
  int device;
  int64_t nbytes;
};

std::mutex mutex;
Device devices[kDevices];
std::unordered_map<void*, Block> live;
c10::Allocator* torchs_own = nullptr;
thread_local int device_of_thread = -1;

void count(void* data, int64_t nbytes) {
  const std::lock_guard<std::mutex> guard(mutex);
  Device& device = devices[device_of_thread];
  device.current += nbytes;
  device.peak = std::max(device.peak, device.current);
  live[data] = {device_of_thread, nbytes};
}

void release(void* data) {
  {
    const std::lock_guard<std::mutex> guard(mutex);
    const auto found = live.find(data);
    if (found != live.end()) {
      devices[found->second.device].current -= found->second.nbytes;
      live.erase(found);
    }
  }
  torchs_own->raw_deleter()(data);
}

struct CountingAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    // The context must equal the data, or raw_allocate (oneDNN's scratchpad) aborts.
    void* data = torchs_own->allocate(nbytes).release_context();
    if (device_of_thread >= 0 && nbytes > 0) {
      count(data, static_cast<int64_t>(nbytes));
    }
    return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }
  void copy_data(void* to, const void* from, std::size_t nbytes) const override {
    default_copy_data(to, from, nbytes);
  }
};

CountingAllocator counting;

}  // namespace

extern "C" {

void oracle_install() {
  if (torchs_own == nullptr) {
    torchs_own = c10::GetCPUAllocator();
    c10::SetCPUAllocator(&counting, /*priority=*/10);
  }
}

void oracle_set_device(int device) {
  device_of_thread = device;
}

int oracle_get_device() {
  return device_of_thread;
}

int64_t oracle_current(int device) {
  const std::lock_guard<std::mutex> guard(mutex);
  return devices[device].current;
}

int64_t oracle_peak(int device) {
  const std::lock_guard<std::mutex> guard(mutex);
  return devices[device].peak;
}

void oracle_reset_peak(int device) {
  const std::lock_guard<std::mutex> guard(mutex);
  devices[device].peak = devices[device].current;
}

}  // extern "C"
