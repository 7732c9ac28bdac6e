#include "capi/entry.h"

#include <sys/mman.h>

#include <cstring>
#include <mutex>
#include <string_view>
#include <vector>

#include "capi/exchange.h"
#include "capi/handles.h"
#include "capi/allocations.h"
#include "capi/python.h"

namespace fusion::capi {
namespace {

constexpr std::size_t text_limit = 256;  // of a string argument; longer than every valid word

// Reserves addresses that read as zeros, for a tensor whose memory the program sets after phase 1.
std::shared_ptr<char> placeholder(std::size_t size) {
    void *const address = mmap(nullptr, size, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (address == MAP_FAILED) throw std::bad_alloc();
    return {static_cast<char *>(address), [size](char *at) { munmap(at, size); }};
}

// A tensor of a call; keeps its memory allocated during the call.
struct Operand {
    std::shared_ptr<const Tensor> tensor;
    std::shared_ptr<Allocation> memory;  // null where none is necessary, or not yet set
    std::size_t end;                     // bytes from its address to behind its last element
    std::size_t begin;                   // bytes from its address to its first element

    bool lacks_address() const { return tensor->data == nullptr && end != 0; }
    char *first(char *address) const { return address + begin; }
    char *first() const { return first(static_cast<char *>(tensor->data)); }
};

// A tensor that an executor was planned with.
struct Place {
    Handle handle;
    std::size_t position, member;  // of the arguments; of a list, 0 otherwise
    std::uint64_t version;         // of the tensor whose memory Python has
};

struct Planned : Executor {
    ~Planned() override {
        if (const Python *const py = job ? running_python() : nullptr) {
            const Locked locked(*py);
            py->Py_DecRef(job);
        }
    }

    const Operator *op = nullptr;
    PyObject *job = nullptr;  // what entry.plan() returned
    std::vector<Place> positions;
    std::vector<std::shared_ptr<char>> placeholders;
    std::mutex running;  // of one run at a time
};

std::shared_ptr<const Settings> initialized() {
    auto active = settings();
    if (!active) throw Refusal(nn_runtime, "called before aclInit or after aclFinalize");
    return active;
}

// Returns a live tensor in allocated memory. gone: the error code where the tensor or its memory does not exist.
Operand hold(Handle handle, const std::string &param, int gone) {
    const auto tensor = need<Tensor>(handle, param.c_str(), nn_null, gone);
    Operand operand{tensor, nullptr, 0, 0};
    if (is_exchanged(tensor->dtype)) {
        operand.begin = static_cast<std::size_t>(tensor->extent.begin);
        operand.end = static_cast<std::size_t>(tensor->extent.end);
    }
    if (operand.end == 0 || tensor->data == nullptr) return operand;
    operand.memory = tensor->live_memory();
    if (!operand.memory) throw Refusal(gone, param, ": expected device memory, got ", described(tensor->data));
    if (operand.memory->host) throw Refusal(nn_invalid, param, ": expected device memory, got memory of the host");
    return operand;
}

// Returns the tensors of one argument: one, those of a list, or none.
std::vector<Handle> tensors_of(const Value &value, const std::string &param) {
    if (value.handle == nullptr) return {};
    if (value.kind == Value::Kind::tensor) return {value.handle};
    if (value.kind == Value::Kind::tensor_list) return need<TensorList>(value.handle, param.c_str())->values;
    return {};
}

bool has_tensors(const Value &value) {
    return value.kind == Value::Kind::tensor || value.kind == Value::Kind::tensor_list;
}

// Returns the arguments that an operator writes, [first, end): the last tensors that follow one another.
std::pair<std::size_t, std::size_t> outputs_of(std::span<const Value> values) {
    const auto is_tensor = [&](std::size_t i) { return values[i].kind == Value::Kind::tensor; };
    std::size_t end = values.size();
    while (end > 0 && !is_tensor(end - 1)) --end;
    std::size_t first = end;
    while (first > 0 && is_tensor(first - 1)) --first;
    return {first, end};
}

std::string named(const std::string &param, const Value &value, std::size_t member) {
    return value.kind == Value::Kind::tensor ? param : param + "[" + std::to_string(member) + "]";
}

PyObject *text_of(const Python &py, const std::string &text) {
    return py.PyUnicode_DecodeUTF8(text.data(), static_cast<std::ptrdiff_t>(text.size()), "replace");
}

// ------------------------------------------------------------------------------------------------------------ phase 1

// A call before its plan exists; keeps the objects of its handles alive until Python has planned it.
class Request {
public:
    Request(const Operator &op, std::span<const Value> values, const Settings &settings)
        : op_(op), values_(values), settings_(settings), planned_(std::make_shared<Planned>()) {
        planned_->op = &op;
        planned_->operation = op.name;
        const auto [first, end] = outputs_of(values);
        for (std::size_t i = 0; i < values.size(); ++i)
            hold_argument(i, first <= i && i < end ? planned_->outputs : planned_->inputs);
    }

    // Plans the call in Python, under its lock.
    void plan(const Python &py, std::uint64_t &workspace_size) {
        PyObject *const arguments = packed(py);  // first, because it may throw
        const Reference answer(py, called(py, entry().plan,
                                          {text_of(py, op_.name), arguments, text_of(py, settings_.device),
                                           text_of(py, settings_.backend)}));
        refuse(py, answer.get());
        workspace_size = planned_->workspace = py.PyLong_AsUnsignedLongLong(py.PyTuple_GetItem(answer.get(), 1));
        planned_->job = py.PyTuple_GetItem(answer.get(), 2);
        py.Py_IncRef(planned_->job);
    }

    const std::shared_ptr<Planned> &planned() const { return planned_; }

    // Throws the error of a result (code, text, ...).
    static void refuse(const Python &py, PyObject *answer) {
        if (!answer) throw Refusal(nn_inner, exception_text(py));
        const auto code = py.PyLong_AsUnsignedLongLong(py.PyTuple_GetItem(answer, 0));
        if (code == 0) return;
        const char *const text = py.PyUnicode_AsUTF8AndSize(py.PyTuple_GetItem(answer, 1), nullptr);
        const std::string message = text ? text : exception_text(py);
        throw Refusal(static_cast<int>(code), message);
    }

private:
    void hold_argument(std::size_t i, std::vector<Handle> &tensors) {
        const Value &value = values_[i];
        if (value.kind == Value::Kind::int_array && value.handle != nullptr)
            arrays_.push_back(need<IntArray>(value.handle, op_.parameter(i).c_str()));
        if (!has_tensors(value)) return;
        const std::string param = op_.parameter(i);
        tensors.push_back(value.handle);
        std::size_t member = 0;
        for (const Handle handle : tensors_of(value, param)) {
            operands_.push_back(hold(handle, named(param, value, member), nn_invalid));
            planned_->positions.push_back({handle, i, member++, operands_.back().tensor->version});
        }
    }

    PyObject *packed(const Python &py) {
        std::vector<PyObject *> objects(values_.size());
        for (std::size_t i = 0; i < objects.size(); ++i) objects[i] = object_of(py, i);
        return tuple_of(py, objects);
    }

    PyObject *object_of(const Python &py, std::size_t i) {
        const Value &value = values_[i];
        switch (value.kind) {
            case Value::Kind::integer: return py.PyLong_FromLongLong(value.integer);
            case Value::Kind::number: return py.PyFloat_FromDouble(value.number);
            case Value::Kind::flag: return py.PyBool_FromLong(value.flag);
            default: break;
        }
        if (value.kind == Value::Kind::text ? !value.text : !value.handle) {
            py.Py_IncRef(py.none);
            return py.none;
        }
        if (value.kind == Value::Kind::text)
            return text_of(py, std::string(value.text, strnlen(value.text, text_limit)));
        if (value.kind == Value::Kind::int_array) {
            const IntArray &array = *arrays_[next_array_++];
            return py.PyBytes_FromStringAndSize(reinterpret_cast<const char *>(array.values.data()),
                                                static_cast<std::ptrdiff_t>(8 * array.values.size()));
        }
        if (value.kind == Value::Kind::tensor) return tensor_of(py, operands_[next_tensor_++]);
        const std::size_t first = next_tensor_;
        while (next_tensor_ < operands_.size() && planned_->positions[next_tensor_].position == i) ++next_tensor_;
        PyObject *const list = py.PyList_New(static_cast<std::ptrdiff_t>(next_tensor_ - first));
        for (std::size_t at = first; at < next_tensor_; ++at)
            py.PyList_SetItem(list, static_cast<std::ptrdiff_t>(at - first), tensor_of(py, operands_[at]));
        return list;
    }

    PyObject *tensor_of(const Python &py, const Operand &operand) {
        if (!operand.lacks_address()) return exchanged(py, *operand.tensor, operand.first(), settings_.device);
        planned_->placeholders.push_back(placeholder(operand.end));
        return exchanged(py, *operand.tensor, operand.first(planned_->placeholders.back().get()), settings_.device);
    }

    const Operator &op_;
    std::span<const Value> values_;
    const Settings &settings_;
    std::shared_ptr<Planned> planned_;
    std::vector<Operand> operands_;  // as planned_->positions
    std::vector<std::shared_ptr<const IntArray>> arrays_;
    std::size_t next_tensor_ = 0, next_array_ = 0;
};

// ------------------------------------------------------------------------------------------------------------ phase 2

std::shared_ptr<Planned> planned_of(const Operator &op, Handle handle) {
    const auto planned = std::static_pointer_cast<Planned>(look_up(handle, Kind::executor));
    const std::string expected = std::string("executor: expected one of ") + op.name + "GetWorkspaceSize, got ";
    if (!planned) {
        const bool has_ended = ended(handle, Kind::executor);
        throw Refusal(!handle ? nn_null : has_ended ? nn_runtime : nn_invalid, expected, wrong(handle));
    }
    if (planned->op != &op) throw Refusal(nn_invalid, expected, "one of ", planned->operation, "GetWorkspaceSize");
    return planned;
}

// Returns the workspace and keeps it allocated; null where none is necessary.
std::shared_ptr<Allocation> check_workspace(const Planned &planned, void *workspace, std::uint64_t size,
                                            const Call &call) {
    const std::uint64_t needed = planned.workspace;
    if (needed == 0) return nullptr;
    const std::string advice = " (phase 1 said " + std::to_string(needed) + ")";
    if (workspace == nullptr) throw Refusal(nn_runtime, "workspace: expected device memory, got null", advice);
    if (size < needed) throw Refusal(nn_runtime, "workspaceSize: expected at least ", needed, ", got ", size);
    auto memory = allocation_of(workspace);
    if (!memory || memory->host)
        throw Refusal(nn_runtime, "workspace: expected device memory, got ", described(workspace), advice);
    const auto first = static_cast<std::size_t>(static_cast<char *>(workspace) - memory->address);
    const std::size_t capacity = memory->granted - first;
    if (capacity < size)
        throw Refusal(nn_runtime, "workspace: expected ", size, " bytes of device memory, got ", capacity,
                      " up to the end of ", described(workspace));
    if (first + needed > memory->requested)
        call.defect("workspace: expected ", needed, " bytes, got ", described(workspace),
                    ", within the pages that the chip gives");
    return memory;
}

// One run: checks all arguments and keeps their memory allocated during the run.
class Run {
public:
    Run(const Operator &op, Planned &planned) : op_(op), planned_(planned) {
        for (const Place &place : planned.positions) {
            operands_.push_back(hold(place.handle, name(place), nn_runtime));
            if (operands_.back().lacks_address())
                throw Refusal(nn_runtime, name(place),
                              ": expected an address before phase 2, got null (aclSetTensorAddr)");
        }
    }

    // Passes changed addresses to Python and runs, under its lock.
    void operator()(const Python &py, const Settings &settings) {
        PyObject *const moved = moves(py, settings);  // first, because it may throw
        py.Py_IncRef(planned_.job);
        const Reference answer(py, called(py, entry().run, {planned_.job, moved}));
        if (answer.get() != py.none) Request::refuse(py, answer.get());
    }

private:
    std::string name(const Place &place) const {
        const std::string param = op_.parameter(place.position);
        return place.member ? param + "[" + std::to_string(place.member) + "]" : param;
    }

    PyObject *moves(const Python &py, const Settings &settings) {
        std::vector<PyObject *> changes;
        for (std::size_t i = 0; i < operands_.size(); ++i) {
            Place &place = planned_.positions[i];
            if (planned_.positions[i].version != operands_[i].tensor->version) {
                changes.push_back(
                    tuple_of(py, {py.PyLong_FromLongLong(static_cast<long long>(place.position)),
                                  py.PyLong_FromLongLong(static_cast<long long>(place.member)),
                                  exchanged(py, *operands_[i].tensor, operands_[i].first(), settings.device)}));
                place.version = operands_[i].tensor->version;
            }
        }
        return tuple_of(py, changes);
    }

    const Operator &op_;
    Planned &planned_;
    std::vector<Operand> operands_;
};

// Locks an executor. Threads must not wait with Python's lock, which the running thread requires.
std::unique_lock<std::mutex> turn(const Python &py, std::mutex &mutex) {
    // try_to_lock() before this would be faster, but requires glibc 2.34.
    void *const state = py.PyGILState_Check() ? py.PyEval_SaveThread() : nullptr;
    std::unique_lock<std::mutex> lock(mutex);
    if (state) py.PyEval_RestoreThread(state);
    return lock;
}

}  // namespace

std::string Operator::parameter(std::size_t i) const {
    std::string_view rest = parameters;
    for (; i > 0; --i) rest.remove_prefix(rest.find(',') + 2);
    return std::string(rest.substr(0, rest.find(',')));
}

aclnnStatus plan(const Operator &op, std::span<const Value> values, std::uint64_t *workspace_size,
                 aclOpExecutor **executor, const void *caller) noexcept {
    const std::string name = std::string(op.name) + "GetWorkspaceSize";
    if (workspace_size) *workspace_size = 0;
    if (executor) *executor = nullptr;
    return coded<nn_runtime>(
        [&](const Call &call) {
            const auto now = initialized();
            if (!workspace_size) throw Refusal(nn_null, "workspaceSize: expected where to write it, got null");
            if (!executor) throw Refusal(nn_null, "executor: expected where to write it, got null");
            Request request(op, values, *now);
            const Python &py = python();
            {
                const Locked locked(py);
                request.plan(py, *workspace_size);
            }
            const void *const handle = add(Kind::executor, request.planned(), call);
            *executor = static_cast<aclOpExecutor *>(const_cast<void *>(handle));
        },
        {name.c_str(), caller});
}

aclnnStatus run(const Operator &op, void *workspace, std::uint64_t workspace_size, aclOpExecutor *executor,
                aclrtStream stream, const void *caller) noexcept {
    return coded<nn_runtime>(
        [&](const Call &call) {
            const auto now = initialized();
            const auto planned = planned_of(op, executor);
            std::string why;
            if (const int code = check_stream(stream, why))
                throw Refusal(code == invalid_param ? nn_invalid : nn_runtime, why);
            const auto capacity = check_workspace(*planned, workspace, workspace_size, call);
            const Python &py = python();
            const auto mine = turn(py, planned->running);
            Run job(op, *planned);
            if (!planned->begin())
                throw Refusal(nn_runtime,
                              "executor: expected one that has not run, got one that has "
                              "(plan again, or aclSetAclOpExecutorRepeatable before its first run)");
            try {
                const Locked locked(py);
                job(py, *now);
            } catch (...) {
                if (!planned->repeatable) planned->used = false;  // Nothing was written: the program may try again.
                throw;
            }
            if (!planned->repeatable) remove(executor, Kind::executor);
        },
        {op.name, caller});
}

}  // namespace fusion::capi
