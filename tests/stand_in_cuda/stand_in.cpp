// A CUDA of two devices in the memory of the CPU, computed on by the CPU's kernels.
//
// To torch they are CUDA devices: tensors have the dispatch keys of CUDA, and autograd
// has a thread for each device. There is one stream, and it is always done, but for
// copies to pinned memory, whose values are wrong until somebody waits.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/NestedTensorImpl.h>
#include <ATen/SparseCsrTensorUtils.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/util/ScopeExit.h>
#include <torch/extension.h>

#include <mutex>
#include <set>

namespace {

using at::IntArrayRef;
using at::Tensor;

// ---- Devices: each thread has a current one.

constexpr auto CUDA = c10::DeviceType::CUDA;
constexpr c10::DeviceIndex DEVICES = 2;
thread_local c10::DeviceIndex current = 0;

c10::DeviceIndex exchange(c10::DeviceIndex device) {
    auto before = current;
    if (device >= 0) current = device;
    return before;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override { return CUDA; }
    c10::Device exchangeDevice(c10::Device device) const override {
        return {CUDA, exchange(device.index())};
    }
    c10::Device getDevice() const override { return {CUDA, current}; }
    void setDevice(c10::Device device) const override { exchange(device.index()); }
    void uncheckedSetDevice(c10::Device device) const noexcept override {
        exchange(device.index());
    }
    c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }
    c10::Stream getStream(c10::Device device) const override {
        return c10::Stream(c10::Stream::DEFAULT, device);
    }
    c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
        return getStream(device);
    }
    c10::Stream exchangeStream(c10::Stream stream) const override {
        return getStream(stream.device());
    }
    // An event between streams has happened as soon as it is recorded.
    void record(
        void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag
    ) const override {}
    void block(void*, const c10::Stream&) const override {}
    void destroyEvent(void*, c10::DeviceIndex) const noexcept override {}
};

// ---- Memory: of the devices, which can run out, and pinned.

struct Memory : c10::Allocator {
    void copy_data(void* to, const void* from, size_t size) const override {
        default_copy_data(to, from, size);
    }
};

struct DeviceMemory final : Memory {
    // Of both devices together; the first two in bytes.
    std::atomic<int64_t> limit = 0, held = 0, times_run_out = 0;

    struct Block {
        void* start;
        int64_t size;
    };

    c10::DataPtr allocate(size_t size) override;
    static void release(void* block);
} device_memory;

c10::DataPtr DeviceMemory::allocate(size_t size) {
    c10::Device device(CUDA, current);
    if (size == 0) return {nullptr, device};
    if (held + int64_t(size) > limit) {
        ++times_run_out;
        TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory (stand-in)");
    }
    held += size;
    auto start = c10::alloc_cpu(size);
    memset(start, 0x7f, std::min<size_t>(size, 1 << 20));  // large numbers, no zeros
    return {start, new Block{start, int64_t(size)}, &release, device};
}

void DeviceMemory::release(void* given) {
    auto block = static_cast<Block*>(given);
    c10::free_cpu(block->start);
    device_memory.held -= block->size;
    delete block;
}

void resize_storage(uintptr_t address, int64_t size) {
    auto storage = reinterpret_cast<c10::StorageImpl*>(address);
    auto made = device_memory.allocate(size);
    auto kept = std::min<int64_t>(size, storage->nbytes());
    if (kept) memcpy(made.get(), storage->data(), kept);
    storage->set_data_ptr_noswap(std::move(made));
    storage->set_nbytes(size);
}

struct PinnedMemory final : Memory {
    std::mutex mutex;
    std::set<const void*> blocks;

    c10::DataPtr allocate(size_t size) override {
        auto start = c10::alloc_cpu(size);
        std::lock_guard lock(mutex);
        blocks.insert(start);
        return {start, start, &release, c10::DeviceType::CPU};
    }
    static void release(void* start);
    bool has(const void* start) {
        std::lock_guard lock(mutex);
        return blocks.count(start) > 0;
    }
} pinned_memory;

void PinnedMemory::release(void* start) {
    {
        std::lock_guard lock(pinned_memory.mutex);
        pinned_memory.blocks.erase(start);
    }
    c10::free_cpu(start);
}

// What torch asks a build with CUDA.
struct Hooks final : at::CUDAHooksInterface {
    explicit Hooks(at::CUDAHooksArgs) {}
    void init() const override {}
    bool hasCUDA() const override { return true; }
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
    c10::DeviceIndex deviceCount() const override { return DEVICES; }
    bool isPinnedPtr(const void* start) const override {
        return pinned_memory.has(start);
    }
    at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
    at::Generator getNewGenerator(c10::DeviceIndex) const override {
        return at::make_generator<at::CPUGeneratorImpl>();
    }
};

// ---- Graphs: the calls of kernels while one is captured, to be made again.

struct Call {
    c10::OperatorHandle operation;
    std::vector<c10::IValue> given, found;
};

struct Graph {
    std::vector<Call> calls;
};

Graph* captured = nullptr;  // one at a time
thread_local bool in_kernel = false;  // what a kernel does by itself is part of it

bool is_capturing() { return captured && !in_kernel; }

// ---- Waits: refused where they are looked for, or while a graph is captured.

bool waits_are_refused = false;
std::mutex late_mutex;
std::vector<std::pair<Tensor, Tensor>> late;  // where to, and what

void arrive() {
    std::vector<std::pair<Tensor, Tensor>> arrived;
    {
        std::lock_guard lock(late_mutex);
        arrived.swap(late);
    }
    at::AutoDispatchBelowADInplaceOrView guard;
    for (auto& [to, what] : arrived) to.copy_(what);
}

void wait_for_the_device(const std::string& why) {
    TORCH_CHECK(
        !captured, "CUDA error: operation not permitted when stream is capturing: ", why
    );
    TORCH_CHECK(!waits_are_refused, "called a synchronizing CUDA operation: ", why);
    arrive();
}

// ---- Tensors: made, and copied.

using Type = std::optional<at::ScalarType>;
using Layout = std::optional<at::Layout>;
using Device = std::optional<at::Device>;
using Pinned = std::optional<bool>;
using Format = std::optional<at::MemoryFormat>;
constexpr c10::DispatchKeySet KEYS(c10::DispatchKey::CUDA);

Tensor empty(
    IntArrayRef size, Type type, Layout, Device device, Pinned, Format format
) {
    c10::OptionalDeviceGuard guard(device);
    auto dtype = c10::dtype_or_default(type);
    return at::detail::empty_generic(size, &device_memory, KEYS, dtype, format);
}

Tensor empty_strided(
    IntArrayRef size, IntArrayRef stride, Type type, Layout, Device device, Pinned
) {
    c10::OptionalDeviceGuard guard(device);
    auto dtype = c10::dtype_or_default(type);
    return at::detail::empty_strided_generic(size, stride, &device_memory, KEYS, dtype);
}

Tensor parts_on_cpu(const Tensor& tensor);

// Return a tensor of the CPU in the same memory.
Tensor on_cpu(const Tensor& tensor) {
    if (tensor.is_cpu()) return tensor;
    if (tensor.layout() != at::kStrided || tensor.is_nested()) return parts_on_cpu(tensor);
    auto start = static_cast<char*>(tensor.storage().data_ptr().get());
    auto data = start ? start + tensor.storage_offset() * tensor.itemsize() : nullptr;
    auto found = at::for_blob(data, tensor.sizes())
        .strides(tensor.strides())
        .deleter([kept = tensor.storage()](void*) {})
        .options(tensor.options().device(at::kCPU))
        .allocator(c10::GetAllocator(c10::DeviceType::CPU))
        .resizeable_storage()  // as kernels may write more to it
        .make_tensor();
    found._set_conj(tensor.is_conj());
    found._set_neg(tensor.is_neg());
    return found;
}

// Return a sparse or nested tensor of the CPU whose parts are in the same memory.
Tensor parts_on_cpu(const Tensor& tensor) {
    if (tensor.is_nested()) {
        auto it = at::native::get_nested_tensor_impl(tensor);
        return at::detail::make_tensor<at::native::NestedTensorImpl>(
            on_cpu(it->get_buffer()), it->get_nested_sizes(), it->get_nested_strides(),
            it->get_storage_offsets()
        );
    }
    auto options = tensor.options().device(at::kCPU);
    if (tensor.is_sparse())
        return at::_sparse_coo_tensor_unsafe(
            on_cpu(tensor._indices()), on_cpu(tensor._values()), tensor.sizes(), options,
            tensor.is_coalesced()
        );
    auto [compressed, plain] = at::sparse_csr::getCompressedPlainIndices(tensor);
    return at::_sparse_compressed_tensor_unsafe(
        on_cpu(compressed), on_cpu(plain), on_cpu(tensor.values()), tensor.sizes(), options
    );
}

void copy_now(Tensor& to, const Tensor& from, bool non_blocking) {
    bool is_between = to.is_cpu() != from.is_cpu() && to.numel() && !in_kernel;
    if (is_between && !non_blocking) wait_for_the_device("a copy");
    if (is_between && non_blocking && pinned_memory.has(to.storage().data())) {
        auto what = on_cpu(from).expand(to.sizes()).clone();
        to.fill_(to.is_floating_point() ? -12345 : 0);
        std::lock_guard lock(late_mutex);
        late.emplace_back(to, what);
        return;
    }
    on_cpu(to).copy_(on_cpu(from));
}

Tensor& copy_(Tensor& to, const Tensor& from, bool non_blocking) {
    copy_now(to, from, non_blocking);
    if (is_capturing()) {
        auto& every = c10::Dispatcher::singleton();
        auto operation = every.findSchemaOrThrow("aten::copy_", "");
        captured->calls.push_back({operation, {to, from, non_blocking}, {to}});
    }
    return to;
}

// What the CPU's kernels are given: the memory itself, but where they may ask for more,
// as some that write a single number do on the way.
std::vector<Tensor> to_cpu(at::TensorList tensors) {
    std::vector<Tensor> found;
    for (auto& it : tensors) {
        auto made = it.numel() ? on_cpu(it) : at::empty_like(it, at::kCPU);
        found.push_back(it.numel() && !it.dim() ? made.clone() : made);
    }
    return found;
}

// What follows for an argument to which they write.
Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
    if (to.is_sparse() || at::sparse_csr::is_sparse_compressed(to)) {
        auto made = from.to(to.device());
        return made.is_sparse() ? at::copy_sparse_to_sparse_(const_cast<Tensor&>(to), made)
                                : const_cast<Tensor&>(to).copy_(made);
    }
    if (to.sizes() != from.sizes()) to.resize_(from.sizes());
    if (to.data_ptr() != from.data_ptr()) on_cpu(to).copy_(on_cpu(from));
    return to;
}

at::Scalar local_scalar_dense(const Tensor& tensor) {
    wait_for_the_device("item()");
    return on_cpu(tensor).item();
}

// ---- All other operations: the CPU's kernels.

// Where the CPU must know numbers of a GPU, as for the shape of the result.
const std::set<std::string> WAITING = {
    "aten::_coalesce", "aten::_to_sparse", "aten::_unique2", "aten::bincount",
    "aten::equal", "aten::histc",
    "aten::masked_select", "aten::nonzero", "aten::repeat_interleave",
    "aten::unique_consecutive", "aten::unique_dim",
};

// Where indices or sizes may be on the CPU.
const std::set<std::string> INDEXING = {
    "aten::_index_put_impl_", "aten::_nested_from_padded", "aten::index",
};

// Where a tensor without axes may not be on the CPU, as it may elsewhere.
const std::set<std::string> STRICT = {
    "aten::addmm", "aten::bmm", "aten::cat", "aten::dot", "aten::embedding",
    "aten::gather", "aten::index_add", "aten::index_select", "aten::mm", "aten::mv",
    "aten::scatter", "aten::scatter_add",
};

// Silences that such a number was resized on the way.
struct Silence final : c10::WarningHandler {
    void process(const c10::Warning&) override {}
} silence;

void require_one_device(const std::string& name, const std::vector<Tensor>& tensors) {
    std::optional<c10::Device> device;
    for (auto& it : tensors)
        if (it.is_cuda() && !device) device = it.device();
    for (auto& it : tensors) {
        if (!device || it.device() == *device) continue;
        bool is_number = it.dim() == 0 && !STRICT.count(name);
        TORCH_CHECK(
            it.is_cpu() && (is_number || INDEXING.count(name)),
            "Expected all tensors to be on the same device, but found at least two "
            "devices, ", *device, " and ", it.device(), ": ", name
        );
    }
}

template <c10::DispatchKey of_the_cpu = c10::DispatchKey::CPU>
void by_the_cpu(
    const c10::OperatorHandle& operation, c10::DispatchKeySet, torch::jit::Stack* stack
) {
    auto& schema = operation.schema();
    auto first = stack->end() - schema.arguments().size();
    std::vector<c10::IValue> given(first, stack->end());
    std::vector<Tensor> tensors;
    bool waits = WAITING.count(schema.name());
    for (auto& value : given) {
        if (value.isTensor()) tensors.push_back(value.toTensor());
        if (value.isTensorList())
            for (Tensor it : value.toTensorList()) tensors.push_back(it);
        if (value.isOptionalTensorList())
            for (std::optional<Tensor> it : value.toOptionalTensorList()) {
                tensors.push_back(it.value_or(Tensor()));
                waits |= it && it->is_cuda() && it->scalar_type() == at::kBool;  // mask
            }
    }
    std::erase_if(tensors, [](auto& it) { return !it.defined(); });
    require_one_device(schema.name(), tensors);
    if (waits) wait_for_the_device(schema.name());
    {
        auto outer = std::exchange(in_kernel, true);
        auto leave = c10::make_scope_exit([&] { in_kernel = outer; });
        c10::WarningUtils::WarningHandlerGuard quiet(&silence);
        at::native::cpu_fallback(
            operation, stack, /*error_on_views=*/true, of_the_cpu
        );
    }
    if (is_capturing())
        captured->calls.push_back(
            {operation, given, {stack->end() - schema.returns().size(), stack->end()}}
        );
}

// ---- Sparse and nested tensors.

// Calls the CPU's kernel as it is: it is the GPU's too, and only calls others.
template <c10::DispatchKey of_the_cpu>
void as_the_cpu_does(
    const c10::OperatorHandle& operation, c10::DispatchKeySet, torch::jit::Stack* stack
) {
    operation.callBoxedForDispatchKey(of_the_cpu, *stack);
}

void replay(const Graph& graph) {
    at::AutoDispatchBelowADInplaceOrView guard;
    for (auto& [operation, given, found] : graph.calls) {
        torch::jit::Stack stack(given.begin(), given.end());
        operation.callBoxed(stack);
        for (size_t i = 0; i < found.size(); ++i) {
            if (!found[i].isTensor() || !found[i].toTensor().defined()) continue;
            auto to = found[i].toTensor(), from = stack[i].toTensor();
            if (!to.is_same(from)) on_cpu(to).copy_(on_cpu(from));
        }
    }
}

}  // namespace

namespace at {
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, Hooks)
}

C10_REGISTER_GUARD_IMPL(CUDA, Guard)
REGISTER_ALLOCATOR(CUDA, &device_memory)

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
    library.impl("empty.memory_format", empty);
    library.impl("empty_strided", empty_strided);
    library.impl("copy_", copy_);
    library.impl("_to_cpu", to_cpu);
    library.impl("_copy_from_and_resize", copy_from_and_resize);
    library.impl("_local_scalar_dense", local_scalar_dense);
    library.impl("resize_", at::native::resize_);
    library.impl("_reshape_alias", at::native::_reshape_alias);
    library.impl("as_strided", at::native::as_strided_tensorimpl);
    library.impl("unfold", at::native::unfold);
    library.impl("view", at::native::view);
    library.impl("view_as_real", at::native::view_as_real);
    library.impl("view_as_complex", at::native::view_as_complex);
    using Set = Tensor& (*)(Tensor&, at::Storage);
    library.impl("set_.source_Storage", Set(at::native::set_));
    library.impl("set_.source_Tensor", at::native::set_tensor_);
    library.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
    // As a whole: they would ask for kernels that only CUDA has.
    for (auto name : {"convolution", "convolution_backward", "_fused_rms_norm"})
        library.impl(name, torch::CppFunction::makeFromBoxedFunction<&by_the_cpu<>>());
}

TORCH_LIBRARY_IMPL(_, CUDA, library) {
    library.fallback(torch::CppFunction::makeFromBoxedFunction<&by_the_cpu<>>());
}

// Registers what computes on a kind of tensors: torch's own names say which kernels
// there are, as without one torch would not ask the fallback where it has a formula.
template <c10::DispatchKey of_the_cpu, c10::DispatchKey here>
void register_kind(
    const std::set<std::string>& shared, const std::set<std::string>& others
) {
    using Library = torch::Library;
    static Library every(Library::IMPL, "_", here, __FILE__, __LINE__);
    static Library library(Library::IMPL, "aten", here, __FILE__, __LINE__);
    using torch::CppFunction;
    every.fallback(CppFunction::makeFromBoxedFunction<&by_the_cpu<of_the_cpu>>());
    for (auto& name : shared)
        library.impl(
            name.c_str(), CppFunction::makeFromBoxedFunction<&as_the_cpu_does<of_the_cpu>>()
        );
    for (auto& name : others)
        library.impl(
            name.c_str(), CppFunction::makeFromBoxedFunction<&by_the_cpu<of_the_cpu>>()
        );
    library.impl("_to_cpu", to_cpu);
    library.impl("_copy_from_and_resize", copy_from_and_resize);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
    module.attr("DEVICES") = int(DEVICES);
    module.def("current_device", [] { return int(current); });
    module.def("exchange_device", [](int device) { return int(exchange(device)); });
    module.def("synchronize", [] { wait_for_the_device("synchronize()"); });
    module.def("refuse_waits", [](bool refused) { waits_are_refused = refused; });
    module.def("is_capturing", [] { return captured != nullptr; });
    using Key = c10::DispatchKey;
    module.def("register_sparse", &register_kind<Key::SparseCPU, Key::SparseCUDA>);
    module.def("register_sparse_csr", &register_kind<Key::SparseCsrCPU, Key::SparseCsrCUDA>);
    module.def("register_nested", &register_kind<Key::NestedTensorCPU, Key::NestedTensorCUDA>);
    module.def("resize_storage", &resize_storage);
    module.def("limit_memory", [](int64_t limit) { device_memory.limit = limit; });
    module.def("memory_held", [] { return int64_t(device_memory.held); });
    module.def("times_run_out", [] { return int64_t(device_memory.times_run_out); });
    py::class_<Graph>(module, "Graph")
        .def(py::init<>())
        .def("begin", [](Graph& graph) { captured = &graph; })
        .def("end", [](Graph&) { captured = nullptr; })
        .def("replay", &replay, py::call_guard<py::gil_scoped_release>());
}
