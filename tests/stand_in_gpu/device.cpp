// A CUDA device made of the host, for a torch that is built without CUDA: its memory is the host's, and its kernels are
// the CPU's, on that memory. Tensors say `cuda`, so that all code for a GPU runs. Kernels that a CPU does not have are
// those of stand_in_attention.py and stand_in_float8.py, those of Triton are interpreted, and what `torch.compile` makes
// of a model is called operator by operator, instead of as Inductor's kernels.
//
// It refuses what a GPU refuses, tensors of two devices, and counts what makes the host wait for a GPU. Nothing is
// asynchronous: a race between streams is not seen here.
//
// The library is loaded before Python imports torch, which asks for hooks and allocators once.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/library.h>

#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <unordered_set>

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::IValue;
using c10::Stream;

namespace {

constexpr DeviceIndex kDevices = 4;
thread_local DeviceIndex device_now = 0;

// ---- what the host waits for

void (*on_wait)(const char*) = nullptr;

void wait_for(const std::string& what) {
  if (on_wait) on_wait(what.c_str());
}

// ---- memory

std::atomic<int64_t> allocated{0}, peak{0};

void add_bytes(int64_t n) {
  int64_t now = allocated += n, most = peak.load();
  while (now > most && !peak.compare_exchange_weak(most, now)) {
  }
}

struct DeviceAllocator final : c10::DeviceAllocator {
  struct Block {
    void* data;
    int64_t bytes;
  };
  c10::DataPtr allocate(size_t bytes) override {
    Device device(DeviceType::CUDA, device_now);
    if (bytes == 0) return {nullptr, nullptr, [](void*) {}, device};
    void* data = c10::GetCPUAllocator()->raw_allocate(bytes);
    std::memset(data, 0x7b, bytes); // no zeros by chance
    add_bytes(static_cast<int64_t>(bytes));
    return {data, new Block{data, static_cast<int64_t>(bytes)}, &free, device};
  }
  static void free(void* context) {
    auto* block = static_cast<Block*>(context);
    allocated -= block->bytes;
    c10::GetCPUAllocator()->raw_deallocate(block->data);
    delete block;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex) override { return {}; }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex) override { peak = allocated.load(); }
};
DeviceAllocator device_allocator;

// Pinned memory is any memory of the host; its addresses are remembered.
std::mutex pinned_mutex;
std::map<const char*, size_t> pinned;

void pin(const void* data, size_t bytes) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  pinned[static_cast<const char*>(data)] = bytes;
}

void unpin(const void* data) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  pinned.erase(static_cast<const char*>(data));
}

bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  auto after = pinned.upper_bound(static_cast<const char*>(data));
  if (after == pinned.begin()) return false;
  --after;
  return static_cast<const char*>(data) < after->first + after->second;
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = c10::GetCPUAllocator()->raw_allocate(std::max<size_t>(bytes, 1));
    pin(data, std::max<size_t>(bytes, 1));
    auto free = [](void* block) {
      unpin(block);
      c10::GetCPUAllocator()->raw_deallocate(block);
    };
    return {data, data, free, Device(DeviceType::CPU)};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
PinnedAllocator pinned_allocator;

// ---- devices and streams: everything is done in the order of the calls

thread_local int64_t stream_now[kDevices] = {};
std::atomic<int64_t> next_stream{1};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static DeviceIndex index(Device device) { return device.index() < 0 ? device_now : device.index(); }
  static Stream stream(Device device, int64_t id) {
    return Stream(Stream::UNSAFE, Device(DeviceType::CUDA, index(device)), id);
  }
  DeviceType type() const override { return DeviceType::CUDA; }
  Device getDevice() const override { return {DeviceType::CUDA, device_now}; }
  Device exchangeDevice(Device device) const override {
    return {DeviceType::CUDA, std::exchange(device_now, index(device))};
  }
  void setDevice(Device device) const override { device_now = index(device); }
  void uncheckedSetDevice(Device device) const noexcept override { device_now = index(device); }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }
  Stream getStream(Device device) const override { return stream(device, stream_now[index(device)]); }
  Stream getDefaultStream(Device device) const override { return stream(device, 0); }
  Stream getNewStream(Device device, int) const override { return stream(device, next_stream++); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return stream(device, next_stream++); }
  Stream exchangeStream(Stream given) const override {
    return stream(given.device(), std::exchange(stream_now[index(given.device())], given.id()));
  }
  void* getStreamNativeHandle(const Stream) const override { return nullptr; }
  void record(void** event, const Stream&, const DeviceIndex, const c10::EventFlag) const override {
    static int recorded;
    *event = &recorded;
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override { wait_for("stream.synchronize"); }
  void synchronizeEvent(void*) const override { wait_for("event.synchronize"); }
  void synchronizeDevice(const DeviceIndex) const override { wait_for("device.synchronize"); }
  double elapsedTime(void*, void*, const DeviceIndex) const override { return 1.0; }
};

// ---- random numbers: a generator of the CPU for each device, apart from the CPU's own

struct DeviceGenerator final : c10::GeneratorImpl {
  explicit DeviceGenerator(DeviceIndex index)
      : GeneratorImpl(Device(DeviceType::CUDA, index), c10::DispatchKeySet(c10::DispatchKey::CUDA)),
        of_cpu(at::detail::createCPUGenerator()) {}
  void set_current_seed(uint64_t seed) override { of_cpu.set_current_seed(seed); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return of_cpu.current_seed(); }
  uint64_t seed() override { return of_cpu.seed(); }
  void set_state(const c10::TensorImpl& state) override { of_cpu.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return of_cpu.unsafeGetGeneratorImpl()->get_state();
  }
  static at::Generator behind(const at::Generator& generator) {
    return static_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl())->of_cpu;
  }
  at::Generator of_cpu;

 private:
  DeviceGenerator* clone_impl() const override {
    auto* copy = new DeviceGenerator(device_.index());
    copy->of_cpu = of_cpu.clone();
    return copy;
  }
};

at::Generator default_generators[kDevices]; // Python makes them, and keeps them in torch.cuda.default_generators

TORCH_LIBRARY(stand_in_gpu, m) {
  m.def("set_default(Generator? generator) -> ()", [](at::Generator generator) {
    default_generators[generator.device().index()] = generator;
  });
}

} // namespace

namespace at {

struct CUDAHooks : public CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  const Generator& getDefaultGenerator(DeviceIndex index) const override {
    return default_generators[index < 0 ? device_now : index];
  }
  Generator getNewGenerator(DeviceIndex index) const override {
    return make_generator<DeviceGenerator>(index < 0 ? device_now : index);
  }
  Device getDeviceFromPtr(void*) const override { return Device(DeviceType::CUDA, device_now); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  Allocator* getCUDADeviceAllocator() const override { return &device_allocator; }
  int getNumGPUs() const override { return kDevices; }
  DeviceIndex deviceCount() const override { return kDevices; }
  DeviceIndex current_device() const override { return device_now; }
  DeviceIndex getCurrentDevice() const override { return device_now; }
  void setCurrentDevice(DeviceIndex index) const override { device_now = index; }
  DeviceIndex exchangeDevice(DeviceIndex index) const override { return std::exchange(device_now, index); }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return std::exchange(device_now, index); }
  void deviceSynchronize(DeviceIndex) const override { wait_for("device.synchronize"); }
};
REGISTER_CUDA_HOOKS(CUDAHooks);

} // namespace at

namespace {

C10_REGISTER_GUARD_IMPL(CUDA, Guard);

// ---- one memory, seen from both sides

// Gives `storage` to a tensor with the shape of `like`.
at::Tensor with_storage(c10::Storage&& storage, c10::DispatchKey key, const at::Tensor& like) {
  auto made =
      at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  made.unsafeGetTensorImpl()->set_storage_offset(like.storage_offset());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides());
  return made;
}

at::Tensor on_host(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  auto* keeper = new c10::Storage(tensor.storage());
  auto release = [](void* context) { delete static_cast<c10::Storage*>(context); };
  c10::DataPtr data(keeper->mutable_data(), keeper, release, Device(DeviceType::CPU));
  c10::Storage storage(
      c10::Storage::use_byte_size_t(), keeper->nbytes(), std::move(data), c10::GetCPUAllocator(), true);
  return with_storage(std::move(storage), c10::DispatchKey::CPU, tensor);
}

at::Tensor on_device(const at::Tensor& tensor, DeviceIndex index) {
  if (!tensor.defined() || tensor.is_cuda()) return tensor;
  auto* keeper = new c10::Storage(tensor.storage());
  add_bytes(static_cast<int64_t>(keeper->nbytes()));
  auto release = [](void* context) {
    auto* kept = static_cast<c10::Storage*>(context);
    allocated -= static_cast<int64_t>(kept->nbytes());
    delete kept;
  };
  c10::DataPtr data(keeper->mutable_data(), keeper, release, Device(DeviceType::CUDA, index));
  c10::Storage storage(c10::Storage::use_byte_size_t(), keeper->nbytes(), std::move(data), &device_allocator, true);
  return with_storage(std::move(storage), c10::DispatchKey::CUDA, tensor);
}

template <typename F>
void each_tensor(const IValue& value, F&& call) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) call(value.toTensor());
  } else if (value.isList()) {
    for (const IValue& each : value.toListRef()) each_tensor(each, call);
  }
}

std::vector<at::Tensor> all_on_host(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> made;
  for (const at::Tensor& each : tensors) made.push_back(on_host(each));
  return made;
}

IValue on_host(const IValue& value) {
  if (value.isTensor()) return on_host(value.toTensor());
  if (value.isTensorList()) return IValue(c10::List<at::Tensor>(all_on_host(value.toTensorVector())));
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> made;
    for (const auto& each : value.toOptionalTensorVector())
      made.push_back(each ? std::optional<at::Tensor>(on_host(*each)) : std::nullopt);
    return IValue(made);
  }
  if (value.isList() && !value.toListRef().empty() && value.toListRef()[0].isTensorList()) { // collectives have such
    c10::List<std::vector<at::Tensor>> made;
    for (const IValue& each : value.toListRef()) made.push_back(all_on_host(each.toTensorVector()));
    return IValue(made);
  }
  if (value.isDevice() && value.toDevice().is_cuda()) return Device(DeviceType::CPU);
  if (value.isGenerator() && value.toGenerator().device().is_cuda())
    return DeviceGenerator::behind(value.toGenerator());
  return value;
}

// ---- operators

const std::unordered_set<std::string> kWaits = { // their results, or the sizes of these, are read by the host
    "aten::_local_scalar_dense", "aten::nonzero", "aten::nonzero.out", "aten::equal", "aten::masked_select",
    "aten::masked_select.out", "aten::_unique", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
    "aten::bincount"};
const std::unordered_set<std::string> kIndexing = { // they take indices of the host, and wait for those
    "aten::index.Tensor", "aten::index.Tensor_out", "aten::_unsafe_index.Tensor", "aten::index_put",
    "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index_put"};

bool is_mask(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte;
}

// The device that the arguments are on, which must be one.
DeviceIndex find_device(const std::string& name, const std::vector<IValue>& arguments) {
  DeviceIndex index = -1;
  bool has_host = false;
  for (const IValue& argument : arguments) {
    each_tensor(argument, [&](const at::Tensor& tensor) {
      if (tensor.is_cuda()) {
        TORCH_CHECK(index < 0 || index == tensor.get_device(), name, " of tensors of two GPUs");
        index = tensor.get_device();
      }
      has_host = has_host || (tensor.is_cpu() && tensor.dim() > 0); // a scalar of the host is no pointer to a kernel
    });
    if (argument.isDevice() && argument.toDevice().is_cuda() && index < 0) index = Guard::index(argument.toDevice());
  }
  if (has_host && kIndexing.count(name))
    wait_for(name + " by indices of the host");
  else
    TORCH_CHECK(!has_host, "Expected all tensors to be on the same device, but ", name, " has some of cpu and of cuda");
  return index < 0 ? device_now : index;
}

// Reports an operator for which a GPU makes the host wait.
void report_wait(const std::string& name, const std::vector<IValue>& arguments) {
  bool waits = kWaits.count(name) > 0 || (name == "aten::repeat_interleave.Tensor" && arguments[1].isNone());
  if (kIndexing.count(name))
    each_tensor(arguments[1], [&](const at::Tensor& tensor) { waits = waits || is_mask(tensor); });
  if (waits) wait_for(name);
}

// Gives an argument that the operator has written to the size and memory that it got (`out =`).
void take_over(const at::Tensor& original, const at::Tensor& host, DeviceIndex index) {
  if (!original.defined() || !original.is_cuda()) return;
  if (original.sizes() == host.sizes() && original.strides() == host.strides() &&
      host.storage().data() == original.storage().data())
    return;
  at::Tensor made = on_device(host, index);
  original.unsafeGetTensorImpl()->set_storage_keep_dtype(made.storage());
  original.unsafeGetTensorImpl()->set_storage_offset(made.storage_offset());
  original.unsafeGetTensorImpl()->set_sizes_and_strides(made.sizes(), made.strides());
}

// The kernel of every operator that has none below.
void run_on_host(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& arguments = schema.arguments();
  const std::string name =
      schema.overload_name().empty() ? schema.name() : schema.name() + "." + schema.overload_name();
  const auto begin = stack->size() - arguments.size();
  const std::vector<IValue> originals(stack->begin() + begin, stack->end());
  const DeviceIndex index = find_device(name, originals);
  report_wait(name, originals);

  for (size_t i = 0; i < arguments.size(); ++i) {
    IValue& value = (*stack)[begin + i];
    value = on_host(originals[i]);
    if (value.isNone() && arguments[i].name() == "generator") value = DeviceGenerator::behind(default_generators[index]);
  }
  const std::vector<IValue> hosts(stack->begin() + begin, stack->end());
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);

  for (size_t i = 0; i < arguments.size(); ++i)
    if (arguments[i].alias_info() && arguments[i].alias_info()->isWrite() && originals[i].isTensor())
      take_over(originals[i].toTensor(), hosts[i].toTensor(), index);

  const auto first = stack->size() - schema.returns().size();
  for (size_t r = 0; r < schema.returns().size(); ++r) {
    IValue& value = (*stack)[first + r];
    const auto* alias = schema.returns()[r].alias_info();
    size_t source = arguments.size();
    for (size_t i = arguments.size(); alias && i-- > 0;)
      if (arguments[i].alias_info() && arguments[i].alias_info()->beforeSets() == alias->beforeSets()) source = i;
    if (source < arguments.size() && alias->isWrite()) {
      value = originals[source];
    } else if (source < arguments.size() && value.isTensor() && originals[source].isTensor()) { // a view
      const at::Tensor view = value.toTensor();
      value = at::native::as_strided_tensorimpl(
          originals[source].toTensor(), view.sizes(), view.strides(), view.storage_offset());
    } else if (value.isTensor()) {
      value = on_device(value.toTensor(), index);
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> made;
      for (const at::Tensor& each : value.toTensorVector()) made.push_back(on_device(each, index));
      value = IValue(c10::List<at::Tensor>(made));
    }
  }
}

DeviceIndex chosen(const std::optional<Device>& device) { return device ? Guard::index(*device) : device_now; }

at::Tensor empty(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const DeviceIndex before = std::exchange(device_now, chosen(device));
  auto made = at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), &device_allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA),
      dtype.value_or(c10::get_default_dtype_as_scalartype()), format);
  device_now = before;
  return made;
}

at::Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  const DeviceIndex before = std::exchange(device_now, chosen(device));
  auto made = at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &device_allocator,
      c10::DispatchKeySet(c10::DispatchKey::CUDA), dtype.value_or(c10::get_default_dtype_as_scalartype()));
  device_now = before;
  return made;
}

at::Tensor& copy(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (self.is_cuda() != source.is_cuda() && self.numel() > 0) {
    const std::string way = self.is_cuda() ? "to the GPU" : "to the host";
    const at::Tensor& host = self.is_cuda() ? source : self;
    if (!non_blocking)
      wait_for("copy " + way);
    else if (!self.is_cuda() && !is_pinned(host.storage().data())) // a small one to the GPU is staged by the driver
      wait_for("copy " + way + ", whose memory is not pinned");
  }
  on_host(self).copy_(on_host(source));
  return self;
}

at::Tensor as_strided(
    const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  auto place = offset ? std::optional<int64_t>(offset->guard_int(__FILE__, __LINE__)) : std::nullopt;
  return at::native::as_strided_tensorimpl(
      self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), place);
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

void resize_storage(c10::StorageImpl& storage, size_t bytes) {
  c10::DataPtr made = device_allocator.allocate(bytes);
  if (const size_t kept = std::min(bytes, storage.nbytes())) std::memcpy(made.get(), storage.data(), kept);
  storage.set_data_ptr_noswap(std::move(made));
  storage.set_nbytes(bytes);
}

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  auto size = C10_AS_INTARRAYREF_SLOW(sizes);
  const auto strides = c10::TensorType::contiguousStridesOf(size);
  const size_t bytes =
      at::detail::computeStorageNbytes(size, strides, self.dtype().itemsize(), self.storage_offset());
  if (bytes > self.storage().nbytes()) resize_storage(*self.storage().unsafeGetStorageImpl(), bytes);
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, strides);
  if (format && *format != at::MemoryFormat::Preserve) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return self;
}

at::Tensor& set_to(
    at::Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto strides = C10_AS_INTARRAYREF_SLOW(stride);
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(source);
  self.unsafeGetTensorImpl()->set_storage_offset(offset.guard_int(__FILE__, __LINE__));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(
      sizes, strides.empty() ? c10::TensorType::contiguousStridesOf(sizes) : strides.vec());
  return self;
}

at::Tensor& set_to_storage(at::Tensor& self, at::Storage source) {
  const int64_t length = source.nbytes() / self.dtype().itemsize();
  return set_to(self, source, 0, c10::SymIntArrayRef{c10::SymInt(length)}, c10::SymIntArrayRef{c10::SymInt(1)});
}

at::Tensor& set_to_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_to(self, source.storage(), source.sym_storage_offset(), source.sym_sizes(), source.sym_strides());
}

// CUDA alone rounds a product to another dtype than its factors have.
at::Tensor& addmm_dtype_out(
    const at::Tensor& self, const at::Tensor& left, const at::Tensor& right, at::ScalarType dtype,
    const at::Scalar& beta, const at::Scalar& alpha, at::Tensor& out) {
  auto product = at::addmm(on_host(self).to(dtype), on_host(left).to(dtype), on_host(right).to(dtype), beta, alpha);
  on_host(out).copy_(product);
  return out;
}

void record_stream(at::Tensor&, Stream) {}

// The first that is allowed and takes such tensors, in the order of a GPU; stand_in_attention.py has them.
int64_t choose_attention(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const std::optional<at::Tensor>& mask,
    double dropout, bool is_causal, std::optional<double>, bool) {
  auto& allowed = at::globalContext();
  const bool is_half = q.scalar_type() == at::kHalf || q.scalar_type() == at::kBFloat16;
  const bool is_dense = q.dim() == 4 && dropout == 0.0 && (!is_causal || q.size(2) == k.size(2));
  const auto fits = [&](int64_t most) { return is_half && q.size(-1) <= most && v.size(-1) <= most; };
  const auto has_whole_rows = [](const at::Tensor& one) { return one.size(-1) * one.itemsize() % 16 == 0; };
  if (is_dense) {
    if (allowed.userEnabledFlashSDP() && !mask && fits(256) && q.size(-1) == v.size(-1))
      return static_cast<int64_t>(sdp::SDPBackend::flash_attention);
    if (allowed.userEnabledMemEfficientSDP() && q.size(1) == k.size(1) && has_whole_rows(q) && has_whole_rows(v))
      return static_cast<int64_t>(sdp::SDPBackend::efficient_attention);
    if (allowed.userEnabledCuDNNSDP() && fits(128) && q.size(-1) % 8 == 0 && v.size(-1) % 8 == 0)
      return static_cast<int64_t>(sdp::SDPBackend::cudnn_attention);
  }
  TORCH_CHECK(allowed.userEnabledMathSDP(), "No available kernel. Aborting execution.");
  return static_cast<int64_t>(sdp::SDPBackend::math);
}
const bool has_attention =
    (at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose_attention), true);

// ---- collectives: gloo's, on the same memory

// gloo knows no average, and no product before a sum. Returns what is to be multiplied first.
double take_factor(c10d::ReduceOp& op, int ranks) {
  double factor = 1.0;
  if (op.op_ == c10d::ReduceOp::AVG) {
    factor = 1.0 / ranks;
  } else if (op.op_ == c10d::ReduceOp::PREMUL_SUM) {
    auto* given = static_cast<c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
    factor = given->tensor_factor.defined() ? on_host(given->tensor_factor).item<double>() : given->double_factor;
  } else {
    return factor;
  }
  op = c10d::ReduceOp(c10d::ReduceOp::SUM);
  return factor;
}

// A group of NCCL alone has nothing for the host's tensors, as which those of the GPU are handed on.
c10::intrusive_ptr<c10d::ProcessGroup> let_it_take_the_host(const IValue& value) {
  auto group = value.toCustomClass<c10d::ProcessGroup>();
  if (!group->hasBackendForDeviceType(DeviceType::CPU))
    group->setBackend(DeviceType::CPU, c10d::ProcessGroup::BackendType::CUSTOM, group->getBackend(DeviceType::CUDA));
  return group;
}

void communicate(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const auto begin = stack->end() - arguments.size();
  int ranks = 1;
  double factor = 1.0;
  for (size_t i = 0; i < arguments.size(); ++i) {
    IValue& value = begin[i];
    value = on_host(value);
    const std::string type = arguments[i].type()->str();
    if (type.find("c10d.ProcessGroup") != std::string::npos) ranks = let_it_take_the_host(value)->getSize();
    if (type.find("c10d.ReduceOp") != std::string::npos) {
      auto given = c10::make_intrusive<c10d::ReduceOp>(*value.toCustomClass<c10d::ReduceOp>());
      factor = take_factor(*given, ranks);
      value = IValue(given);
    }
  }
  if (factor != 1.0) {
    const bool scatters = op.schema().name().find("reduce_scatter") != std::string::npos;
    IValue& inputs = begin[scatters ? 1 : 0];
    std::vector<at::Tensor> made; // of what is scattered: the caller keeps its own
    if (!scatters) {
      each_tensor(inputs, [&](const at::Tensor& each) { at::Tensor(each).mul_(factor); });
    } else if (inputs.isTensor()) {
      inputs = inputs.toTensor() * factor;
    } else {
      TORCH_CHECK(inputs.isTensorList(), op.schema().name(), " with an average is not here");
      for (const at::Tensor& each : inputs.toTensorVector()) made.push_back(each * factor);
      inputs = IValue(c10::List<at::Tensor>(made));
    }
  }
  op.callBoxed(stack);
}

// ---- registrations; torch warns of those that take the place of NCCL's

struct Silence final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
} silence;
const bool is_silent = (c10::WarningUtils::set_warning_handler(&silence), true);
const bool has_allocator = (c10::SetAllocator(DeviceType::CUDA, &device_allocator, 1), true);

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("copy_", TORCH_FN(copy));
  m.impl("as_strided", TORCH_FN(as_strided));
  m.impl("view", TORCH_FN(view));
  m.impl("_reshape_alias", TORCH_FN(reshape_alias));
  m.impl("resize_", TORCH_FN(resize));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_to));
  m.impl("set_.source_Storage", TORCH_FN(set_to_storage));
  m.impl("set_.source_Tensor", TORCH_FN(set_to_tensor));
  m.impl("record_stream", TORCH_FN(record_stream));
  m.impl("addmm.dtype_out", TORCH_FN(addmm_dtype_out));
  m.impl("_fused_sdp_choice", TORCH_FN(choose_attention));
  // torch's own for other devices reads the offsets on the host, which CUDA's kernel does not
  m.impl("_grouped_mm", torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

TORCH_LIBRARY_IMPL(c10d, CUDA, m) {
  for (const char* name :
       {"send", "recv_", "recv_any_source_", "reduce_", "broadcast_", "allreduce_", "allreduce_coalesced_",
        "allgather_", "_allgather_base_", "allgather_coalesced_", "allgather_into_tensor_coalesced_",
        "reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_", "gather_", "scatter_",
        "alltoall_", "alltoall_base_", "barrier"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&communicate>());
}

const bool is_loud_again = (c10::WarningUtils::set_warning_handler(nullptr), true);

} // namespace

// ---- for stand_in_gpu.py

extern "C" {
void stand_in_on_wait(void (*called)(const char*)) { on_wait = called; }
void stand_in_wait(const char* what) { wait_for(what); }
int64_t stand_in_allocated() { return allocated; }
int64_t stand_in_peak() { return peak; }
void stand_in_reset_peak() { peak = allocated.load(); }
int stand_in_device() { return device_now; }
void stand_in_set_device(int index) { device_now = static_cast<DeviceIndex>(index); }
void stand_in_pin(int64_t address, int64_t bytes) { pin(reinterpret_cast<void*>(address), bytes); }
void stand_in_unpin(int64_t address) { unpin(reinterpret_cast<void*>(address)); }
void stand_in_resize_storage(int64_t storage, int64_t bytes) {
  resize_storage(*reinterpret_cast<c10::StorageImpl*>(storage), static_cast<size_t>(bytes));
}
}
