// A pretend accelerator: torch's PrivateUse1 device over host memory. Operators are the CPU's, but operands on two
// devices, a host generator and a host pointer are refused as on a real accelerator. Allocated bytes are exact by device.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <unordered_set>

namespace {

constexpr auto kPretend = c10::DeviceType::PrivateUse1;
constexpr int kDevices = 2;
thread_local c10::DeviceIndex current = 0;

// --- Memory --------------------------------------------------------------------------------------

struct Account {
  std::atomic<int64_t> now{0}, peak{0}, limit{INT64_MAX};
};
Account accounts[kDevices];

// Storage of a tensor on the device: its own bytes, or those of the CPU tensor that an operator returned.
struct Block {
  void* own;
  at::Tensor result;
  int64_t size;
  c10::DeviceIndex device;
};

void free_block(void* pointer) {
  auto* block = static_cast<Block*>(pointer);
  accounts[block->device].now -= block->size;
  std::free(block->own);
  delete block;
}

void account(int64_t size, c10::DeviceIndex device) {
  auto& own = accounts[device];
  TORCH_CHECK_WITH(OutOfMemoryError, own.now + size <= own.limit, "pretend accelerator out of memory. Tried to allocate ",
                   size, " bytes on device ", int(device), ", which has ", own.limit - own.now, " of ", own.limit.load(), " left.");
  const int64_t now = (own.now += size);
  if (now > own.peak) own.peak = now;
}

struct PretendAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    const c10::Device device(kPretend, current);
    if (size == 0) return {nullptr, nullptr, &c10::detail::deleteNothing, device};
    account(size, current);
    void* own = nullptr;
    if (posix_memalign(&own, 64, size)) throw std::bad_alloc();
    return {own, new Block{own, {}, static_cast<int64_t>(size), current}, &free_block, device};
  }
  void copy_data(void* to, const void* from, std::size_t size) const override { std::memcpy(to, from, size); }
};
PretendAllocator allocator;
REGISTER_ALLOCATOR(kPretend, &allocator);

// --- The device, its streams (there is one) and its generators -----------------------------------

struct PretendGuard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kPretend;
  PretendGuard() = default;
  explicit PretendGuard(c10::DeviceType) {}
  c10::DeviceType type() const override { return kPretend; }
  c10::Device exchangeDevice(c10::Device d) const override {
    auto before = current;
    uncheckedSetDevice(d);
    return {kPretend, before};
  }
  c10::Device getDevice() const override { return {kPretend, current}; }
  void setDevice(c10::Device d) const override { uncheckedSetDevice(d); }
  void uncheckedSetDevice(c10::Device d) const noexcept override {
    if (d.index() >= 0) current = d.index();
  }
  c10::Stream getStream(c10::Device d) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, d); }
  c10::Stream getNewStream(c10::Device d, int) const override { return c10::Stream(c10::Stream::DEFAULT, d); }
  c10::Stream exchangeStream(c10::Stream s) const noexcept override { return s; }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, PretendGuard);

struct PretendGenerator final : at::CPUGeneratorImpl {
  explicit PretendGenerator(c10::DeviceIndex index) : at::CPUGeneratorImpl(c10::default_rng_seed_val) {
    device_ = c10::Device(kPretend, index);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

at::Generator& default_generator(int64_t index) {
  static std::vector<at::Generator> all{at::make_generator<PretendGenerator>(0), at::make_generator<PretendGenerator>(1)};
  return all.at(index < 0 ? current : index);
}

struct PretendHooks final : at::PrivateUse1HooksInterface {
  void init() const override {}
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex d) const override { current = d; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex d) const override { return std::exchange(current, d); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex d) const override { return d < 0 ? current : std::exchange(current, d); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex i) const override { return default_generator(i); }
  at::Generator getNewGenerator(c10::DeviceIndex i) const override { return at::make_generator<PretendGenerator>(i < 0 ? current : i); }
  at::Device getDeviceFromPtr(void*) const override { return {kPretend, current}; }
  bool isPinnedPtr(const void*) const override { return false; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto* own = storage.unsafeGetStorageImpl();
    c10::DeviceGuard guard(storage.device());
    auto data = allocator.allocate(size);
    if (own->data()) std::memcpy(data.get(), own->data(), std::min<size_t>(size, own->nbytes()));
    own->set_data_ptr_noswap(std::move(data));
    own->set_nbytes(size);
  }
};

// --- Operators -----------------------------------------------------------------------------------

bool is_ours(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kPretend; }

// The same memory as a tensor of the CPU.
at::Tensor on_host(const at::Tensor& tensor) {
  auto options = tensor.options().device(at::kCPU);
  auto alias = at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
  return alias._set_conj(tensor.is_conj()), alias;
}

// A result of the CPU as a tensor of the device, without a copy.
at::Tensor on_device(at::Tensor result, c10::DeviceIndex device) {
  const auto& storage = result.storage();
  if (storage.use_count() > 1 || storage.nbytes() == 0 || result.storage_offset()) {  // a view of something else
    auto copy = at::empty_strided(result.sizes(), result.strides(), result.options().device(kPretend, device));
    return copy.copy_(result);
  }
  const int64_t size = storage.nbytes();
  account(size, device);
  auto* block = new Block{nullptr, result, size, device};
  c10::DataPtr data(result.data_ptr(), block, &free_block, c10::Device(kPretend, device));
  c10::Storage own(c10::Storage::use_byte_size_t(), size, std::move(data), &allocator, /*resizable=*/true);
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(own), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), result.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(result.sizes(), result.strides());
  return tensor;
}

at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> type, std::optional<c10::Layout>,
                 std::optional<c10::Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(size, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(type), format);
}
at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> type,
                         std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(size, stride, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(type));
}
at::Tensor as_strided(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  return at::cpu::as_strided_symint(self, size, stride, offset);
}
const at::Tensor& resize_(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(self.device());  // torch allocates on the current device
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}
at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  at::Tensor target = is_ours(to) ? on_host(to) : to;
  target.copy_(is_ours(from) ? on_host(from) : from);
  return to;
}
at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  c10::DeviceGuard guard(to.device());
  if (from.sizes() != to.sizes()) at::native::resize_(to, from.sizes(), std::nullopt);
  return copy_from(from, to, false);
}
at::Scalar local_scalar(const at::Tensor& self) { return at::_local_scalar_dense(on_host(self)); }
at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& other) { return at::native::set_tensor_(self, other); }
at::Tensor& set_storage(at::Tensor& self, at::Storage other) { return at::native::set_(self, other); }
at::Tensor& set_part(at::Tensor& self, at::Storage other, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::cpu::set_(self, other, offset, size, stride);
}
at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) { return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size)); }
at::Tensor unfold(const at::Tensor& self, int64_t dim, int64_t size, int64_t step) { return at::native::unfold(self, dim, size, step); }

at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias, c10::IntArrayRef stride,
                       c10::IntArrayRef padding, c10::IntArrayRef dilation, bool is_transposed, c10::IntArrayRef output_padding, int64_t groups) {
  const auto host_bias = bias && bias->defined() ? std::optional(on_host(*bias)) : std::nullopt;
  auto result = at::convolution(on_host(input), on_host(weight), host_bias, stride, padding, dilation, is_transposed, output_padding, groups);
  return on_device(std::move(result), input.device().index());
}
std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& weight, c10::IntArrayRef stride, c10::IntArrayRef padding,
    c10::IntArrayRef dilation, bool is_transposed, c10::IntArrayRef output_padding, int64_t groups, std::array<bool, 3> mask) {
  const std::vector<int64_t> bias_sizes{gradient.size(1)};
  auto [one, two, three] = at::convolution_backward(on_host(gradient), on_host(input), on_host(weight), bias_sizes, stride, padding,
                                                    dilation, is_transposed, output_padding, groups, mask);
  const auto device = input.device().index();
  auto ours = [&](at::Tensor& result) { return result.defined() ? on_device(std::move(result), device) : at::Tensor(); };
  return {ours(one), ours(two), ours(three)};
}

// Operators whose indices may be on the host, as CUDA's.
const std::unordered_set<std::string> kTakeHostIndices = {"aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::index_put", "aten::_unsafe_index"};
// Operators that take a length on the host, and a tensor on the device.
const std::unordered_set<std::string> kTakeHostLengths = {"aten::_pack_padded_sequence"};

class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : op_(op), stack_(stack), schema_(op.schema()), name_(schema_.operator_name().name), count_(schema_.arguments().size()), first_(stack->size() - count_) {}

  void run() {
    for (size_t i = 0; i < count_; ++i) look_at(argument(i));
    const auto device = asked_ ? *asked_ : seen_ ? seen_->index() : current;
    for (size_t i = 0; i < count_; ++i) translate(i, device);
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack_);
    if (theirs_.defined()) ours_.set_state(theirs_.get_state());
    for (auto& [original, host] : resized_) copy_from_and_resize(host, original);
    const auto num_returns = schema_.returns().size(), begin = stack_->size() - num_returns;
    for (size_t i = 0; i < num_returns; ++i) give_back(i, (*stack_)[begin + i], device);
  }

 private:
  c10::IValue& argument(size_t i) { return (*stack_)[first_ + i]; }

  void look_at(const c10::IValue& value) {
    if (value.isTensor()) {
      look_at(value.toTensor());
    } else if (value.isTensorList()) {
      for (const auto& tensor : value.toTensorVector()) look_at(tensor);
    } else if (value.isOptionalTensorList()) {
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList()) look_at(tensor.value_or(at::Tensor()));
    } else if (value.isDevice()) {  // of a result
      asked_ = value.toDevice().has_index() ? value.toDevice().index() : current;
    }
  }

  void look_at(const at::Tensor& tensor) {
    if (!tensor.defined() || (tensor.is_cpu() && tensor.dim() == 0)) return;
    if (!seen_) {
      seen_ = tensor.device();
      TORCH_CHECK(is_ours(tensor) || !kTakeHostIndices.count(name_), "indices should be on the CPU, as the indexed tensor is (in ", name_, ")");
      return;
    }
    const bool may_differ = tensor.is_cpu() && (kTakeHostIndices.count(name_) ? !tensor.is_floating_point() : kTakeHostLengths.count(name_) > 0);
    TORCH_CHECK(*seen_ == tensor.device() || may_differ, "Expected all tensors to be on the same device, but found at least two devices, ",
                *seen_, " and ", tensor.device(), "! (in ", name_, ")");
  }

  void translate(size_t i, c10::DeviceIndex device) {
    auto& value = argument(i);
    const auto& declared = schema_.arguments()[i];
    const bool is_output = declared.is_out();
    if (value.isTensor()) {
      value = host_of(value.toTensor(), i, is_output);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> hosts;
      for (const auto& tensor : value.toTensorVector()) hosts.push_back(host_of(tensor, i, is_output));
      value = hosts;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> hosts;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList())
        hosts.push_back(tensor ? std::optional(host_of(*tensor, i, false)) : std::nullopt);
      value = hosts;
    } else if (value.isDevice()) {
      value = c10::Device(at::kCPU);
    } else if (declared.type()->str().find("Generator") != std::string::npos) {
      ours_ = value.isNone() ? default_generator(device) : value.toGenerator();
      TORCH_CHECK(ours_.device() == c10::Device(kPretend, device), "Expected a generator of pretend:", int(device), " but found one of ", ours_.device(), " (in ", name_, ")");
      theirs_ = at::make_generator<at::CPUGeneratorImpl>();
      theirs_.set_state(ours_.get_state());
      value = theirs_;
    }
  }

  at::Tensor host_of(const at::Tensor& tensor, size_t i, bool is_output) {
    if (!is_ours(tensor)) return tensor;
    const bool is_resizable = is_output && (tensor.storage().nbytes() == 0 || tensor.dim() == 0);
    auto host = is_resizable ? at::empty({0}, tensor.options().device(at::kCPU)) : on_host(tensor);
    if (is_resizable) resized_.emplace_back(tensor, host);
    const auto* alias = schema_.arguments()[i].alias_info();
    if (alias && alias->isWrite()) written_.emplace_back(tensor, host);
    return host;
  }

  void give_back(size_t, c10::IValue& value, c10::DeviceIndex device) {
    if (value.isTensor()) {
      auto result = value.toTensor();
      value = c10::IValue();  // the result's storage is then ours alone
      value = returned(std::move(result), device);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> own;
      auto results = value.toTensorVector();
      value = c10::IValue();
      for (auto& result : results) own.push_back(returned(std::move(result), device));
      value = own;
    }
  }

  at::Tensor returned(at::Tensor result, c10::DeviceIndex device) {
    if (!result.defined()) return result;
    for (const auto& [original, host] : written_)
      if (host.is_same(result)) return original;
    return on_device(std::move(result), device);
  }

  const c10::OperatorHandle& op_;
  torch::jit::Stack* stack_;
  const c10::FunctionSchema& schema_;
  const std::string name_;
  const size_t count_, first_;
  std::optional<c10::Device> seen_;
  std::optional<c10::DeviceIndex> asked_;
  at::Generator ours_, theirs_;
  std::vector<std::pair<at::Tensor, at::Tensor>> written_, resized_;
};

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) { Call(op, stack).run(); }

int64_t attention(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, bool, std::optional<double>, bool) {
  return static_cast<int64_t>(sdp::SDPBackend::math);
}

// --- What torch.pretend calls --------------------------------------------------------------------

int64_t memory_allocated(int64_t device) { return accounts[device].now; }
int64_t max_memory_allocated(int64_t device) { return accounts[device].peak; }
void reset_peak(int64_t device) { accounts[device].peak = accounts[device].now.load(); }
void limit_memory(int64_t device, int64_t limit) { accounts[device].limit = limit; }
int64_t current_device() { return current; }
void set_device(int64_t index) { current = index; }
at::Tensor get_rng_state(int64_t device) { return default_generator(device).get_state(); }
void set_rng_state(const at::Tensor& state, int64_t device) { default_generator(device).set_state(state); }
void manual_seed(int64_t seed, int64_t device) { default_generator(device).set_current_seed(seed); }

PretendHooks hooks;
const bool is_registered = (at::RegisterPrivateUse1HooksInterface(&hooks), true);
}  // namespace

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &attention);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("resize_", resize_);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_part);
  m.impl("view", view);
  m.impl("unfold", unfold);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY(pretend, m) {
  m.def("memory_allocated", memory_allocated);
  m.def("max_memory_allocated", max_memory_allocated);
  m.def("reset_peak", reset_peak);
  m.def("limit_memory", limit_memory);
  m.def("current_device", current_device);
  m.def("set_device", set_device);
  m.def("get_rng_state(int device) -> Tensor", get_rng_state);
  m.def("set_rng_state(Tensor state, int device) -> ()", set_rng_state);
  m.def("manual_seed", manual_seed);
}
