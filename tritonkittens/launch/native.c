// The launch fast path: recognise the arguments, find the prebuilt launch, call cuLaunchKernelEx. No allocation but one key,
// no Python code but the caller's. A launch that is bound is not looked for: it takes the addresses of its tensors, and is called.
// Everything it cannot handle it declines (returns False, or calls a fallback), and Python does it.
//
// libcuda and libtorch are reached through function addresses that native.py looks up, so that this file needs no header but
// Python's, links to nothing, and a test can hand it a stand-in driver.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <alloca.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

// CUlaunchConfig of the CUDA driver API (cuda.h), 56 bytes.
typedef struct {
  uint32_t grid[3], block[3], shared_bytes;
  void *stream, *attributes;
  uint32_t num_attributes;
} LaunchConfig;
_Static_assert(sizeof(LaunchConfig) == 56, "CUlaunchConfig is 56 bytes");

#define ATTRIBUTE_BYTES 72 // sizeof(CUlaunchAttribute)
#define MAX_ATTRIBUTES 8
#define PARAMETER_ALIGNMENT 128 // a CUtensorMap wants 64 (128 in newer headers)
#define MAX_PARAMETER_BYTES 32768
#define MAX_SCALARS 64
#define MAX_KEY_WORDS 512
#define MAX_TENSORS 128
#define POINTER_ALIGNMENT 16 // bytes: what the compiled code may count on
#define MAX_NESTING 16
#define MAX_RANK 5       // of a tensor map
#define MAX_RECIPES 8    // tensor maps that a bound launch encodes anew
#define MAP_BYTES 128
#define COPY_BYTES 16    // what TMA wants strides to be multiples of
#define MAX_STRIDE_BYTES (1ll << 40)
#define SMALL_BYTES (128 * 1024)

typedef int (*LaunchKernelEx)(const LaunchConfig *, void *function, void **parameters, void **extra);
typedef int (*TensorMapReplaceAddress)(void *map, void *address);
typedef int (*TensorMapEncodeTiled)(void *map, int dtype, uint32_t rank, void *address, const uint64_t *extents, const uint64_t *strides,
                                    const uint32_t *box, const uint32_t *element_strides, int interleave, int swizzle, int promotion, int fill);
typedef int (*ContextGetCurrent)(void **);
typedef int (*ContextSetCurrent)(void *);
// torch's stable C interface (aoti_torch_*): a handle is an at::Tensor *, and an at::Tensor is one pointer to its TensorImpl.
typedef int (*TensorGetPointer)(void *handle, void **);
typedef int (*TensorGetInt64)(void *handle, int64_t *);
typedef int (*TensorGetInt64Array)(void *handle, int64_t **);
typedef int (*TensorGetInt32)(void *handle, int32_t *);

typedef struct {
  TensorGetPointer data_ptr;
  TensorGetInt64 dim;
  TensorGetInt64Array sizes, strides;
  TensorGetInt32 dtype, device_type, device_index;
} TensorReader;

static PyObject *cdata_name, *enter_name, *exit_name, *calls_name;

// ---- Binding: one prebuilt launch ------------------------------------------------------------------------------------

// Where the parameters hold a tensor's address: as a pointer, or inside a tensor map.
typedef struct {
  uint32_t tensor, offset, is_map;
} Place;

typedef struct {
  PyObject_HEAD
  void *function, *context;
  PyObject *device;   // int, handed to the stream look-up as it is
  PyObject *owner;    // keeps the compiled kernel and the objects whose addresses are in the key alive
  LaunchConfig config; // without grid, stream and attribute address
  uint32_t num_ctas;
  char attributes[MAX_ATTRIBUTES * ATTRIBUTE_BYTES];
  PyObject *block, *offsets, *slots; // bytes: parameter values; uint32 offset of each parameter; (uint32 offset, uint32 bytes) of each scalar
  PyObject *places, *addresses;      // bytes: a Place for each address among the values; uint64 addresses of the tensors that the values were made for
  char used;
} Binding;

static PyObject *Binding_new(PyTypeObject *type, PyObject *args, PyObject *kwds) {
  unsigned long long function, context;
  unsigned int num_ctas, threads, shared;
  PyObject *device, *owner, *attributes, *block, *offsets, *slots, *places, *addresses;
  if (!PyArg_ParseTuple(args, "KKO!IIISSSSSSO", &function, &context, &PyLong_Type, &device, &num_ctas, &threads, &shared, &attributes,
                        &block, &offsets, &slots, &places, &addresses, &owner))
    return NULL;
  Py_ssize_t attribute_bytes = PyBytes_GET_SIZE(attributes);
  if (attribute_bytes % ATTRIBUTE_BYTES || attribute_bytes > (Py_ssize_t)sizeof(((Binding *)0)->attributes) ||
      PyBytes_GET_SIZE(block) > MAX_PARAMETER_BYTES || PyBytes_GET_SIZE(slots) / 8 > MAX_SCALARS)
    return PyErr_Format(PyExc_ValueError, "a launch takes at most %d attributes, %d parameter bytes and %d scalars", MAX_ATTRIBUTES,
                        MAX_PARAMETER_BYTES, MAX_SCALARS);
  Binding *self = (Binding *)type->tp_alloc(type, 0);
  if (!self)
    return NULL;
  self->function = (void *)(uintptr_t)function;
  self->context = (void *)(uintptr_t)context;
  self->num_ctas = num_ctas;
  self->config = (LaunchConfig){.block = {threads, 1, 1}, .shared_bytes = shared, .num_attributes = attribute_bytes / ATTRIBUTE_BYTES};
  memcpy(self->attributes, PyBytes_AS_STRING(attributes), attribute_bytes);
  self->device = Py_NewRef(device);
  self->owner = Py_NewRef(owner);
  self->block = Py_NewRef(block);
  self->offsets = Py_NewRef(offsets);
  self->slots = Py_NewRef(slots);
  self->places = Py_NewRef(places);
  self->addresses = Py_NewRef(addresses);
  return (PyObject *)self;
}

static int Binding_traverse(Binding *self, visitproc visit, void *arg) {
  Py_VISIT(self->owner);
  return 0;
}

static int Binding_clear(Binding *self) {
  Py_CLEAR(self->owner);
  return 0;
}

static void Binding_dealloc(Binding *self) {
  PyObject_GC_UnTrack(self);
  Binding_clear(self);
  Py_XDECREF(self->device);
  Py_XDECREF(self->block);
  Py_XDECREF(self->offsets);
  Py_XDECREF(self->slots);
  Py_XDECREF(self->places);
  Py_XDECREF(self->addresses);
  Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMemberDef Binding_members[] = {
    {"used", T_BOOL, offsetof(Binding, used), 0, "launched since the cache last looked"},
    {"owner", T_OBJECT_EX, offsetof(Binding, owner), READONLY, "what the binding keeps alive"},
    {NULL},
};

static PyTypeObject BindingType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "tritonkittens_launch.Binding",
    .tp_doc = "Binding(function, context, device, num_ctas, threads, shared, attributes, block, offsets, slots, places, addresses, owner): one prebuilt "
              "launch.",
    .tp_basicsize = sizeof(Binding),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = Binding_new,
    .tp_traverse = (traverseproc)Binding_traverse,
    .tp_clear = (inquiry)Binding_clear,
    .tp_dealloc = (destructor)Binding_dealloc,
    .tp_members = Binding_members,
};

// ---- reading arguments -----------------------------------------------------------------------------------------------

typedef struct {
  uint64_t words[MAX_KEY_WORDS];
  int num_words;
  uint64_t scalars[MAX_SCALARS];
  int num_scalars;
  void *addresses[MAX_TENSORS];
  int num_addresses;
  bool has_tensor, overflow;
} Reading;

enum { TAG_OPEN = 1, TAG_CLOSE, TAG_POINTER, TAG_DESCRIPTOR, TAG_CONSTEXPR, TAG_BOOL, TAG_I32, TAG_I64, TAG_U64, TAG_FP32 };

static inline void put(Reading *reading, uint64_t word) {
  if (reading->num_words < MAX_KEY_WORDS)
    reading->words[reading->num_words++] = word;
  else
    reading->overflow = true;
}

static inline void put_scalar(Reading *reading, int tag, uint64_t bits) {
  put(reading, tag);
  if (reading->num_scalars < MAX_SCALARS)
    reading->scalars[reading->num_scalars++] = bits;
  else
    reading->overflow = true;
}

// ---- Dispatcher ------------------------------------------------------------------------------------------------------

typedef struct {
  PyObject_HEAD
  LaunchKernelEx launch_kernel;
  TensorMapReplaceAddress replace_address;
  TensorMapEncodeTiled encode_tiled;
  ContextGetCurrent context_get;
  ContextSetCurrent context_set;
  TensorReader tensor;
  int32_t device_type;
  PyObject *tensor_types, *global_type, *constexpr_type; // types compared by identity: a subclass may override anything
  PyObject *stream_of, *runtime, *hook_chain, *raise_error, *table;
} Dispatcher;

// The TensorImpl of a tensor on a device of the dispatcher's type, or NULL, maybe with an exception set.
static void *impl_of(Dispatcher *self, PyObject *tensor, int32_t *device_index) {
  PyObject *cdata = PyObject_GetAttr(tensor, cdata_name);
  if (!cdata)
    return NULL;
  void *impl = PyLong_AsVoidPtr(cdata);
  Py_DECREF(cdata);
  int32_t device_type;
  const TensorReader *get = &self->tensor;
  if (!impl || get->device_type(&impl, &device_type) || device_type != self->device_type || get->device_index(&impl, device_index))
    return NULL;
  return impl;
}

// Adds one tensor to the key: pointer arguments by dtype and alignment, TMA arguments also by shape and strides; never by address, for that an
// allocator gives anew. A tensor that TMA cannot address is not for this path.
static bool read_tensor(Dispatcher *self, PyObject *tensor, PyObject *specs, Reading *reading) {
  int32_t dtype, device_index;
  void *impl = impl_of(self, tensor, &device_index), *handle = &impl, *address;
  const TensorReader *get = &self->tensor;
  if (!impl || get->dtype(handle, &dtype) || get->data_ptr(handle, &address))
    return false;
  put(reading, (uint64_t)(specs ? TAG_DESCRIPTOR : TAG_POINTER) | (uint64_t)(uint32_t)dtype << 8 | (uint64_t)(uint32_t)device_index << 32);
  bool is_aligned = (uintptr_t)address % POINTER_ALIGNMENT == 0;
  if (reading->num_addresses < MAX_TENSORS)
    reading->addresses[reading->num_addresses++] = address;
  else
    reading->overflow = true;
  reading->has_tensor = true;
  if (!specs) {
    put(reading, is_aligned);
    return true;
  }
  if (!is_aligned)
    return false;
  int64_t dim, *sizes, *strides;
  if (get->dim(handle, &dim) || dim > 5 || get->sizes(handle, &sizes) || get->strides(handle, &strides))
    return false;
  put(reading, (uint64_t)(uintptr_t)specs); // its identity: the binding keeps it alive
  put(reading, (uint64_t)dim);
  for (int64_t i = 0; i < dim; ++i) {
    put(reading, (uint64_t)sizes[i]);
    put(reading, (uint64_t)strides[i]);
  }
  return true;
}

static inline bool is_plain_tensor(Dispatcher *self, PyObject *value) {
  PyObject *type = (PyObject *)Py_TYPE(value);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(self->tensor_types); ++i)
    if (PyTuple_GET_ITEM(self->tensor_types, i) == type)
      return true;
  return false;
}

static bool read_arguments(Dispatcher *self, PyObject *args, Reading *reading, int depth) {
  if (depth > MAX_NESTING)
    return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); ++i) {
    PyObject *value = PyTuple_GET_ITEM(args, i);
    if (is_plain_tensor(self, value)) {
      if (!read_tensor(self, value, NULL, reading))
        return false;
    } else if ((PyObject *)Py_TYPE(value) == self->global_type && PyTuple_GET_SIZE(value) == 2) {
      PyObject *tensor = PyTuple_GET_ITEM(value, 0);
      if (!is_plain_tensor(self, tensor) || !read_tensor(self, tensor, PyTuple_GET_ITEM(value, 1), reading))
        return false;
    } else if (PyLong_CheckExact(value)) {
      int overflow;
      int64_t number = PyLong_AsLongLongAndOverflow(value, &overflow);
      if (overflow < 0)
        return false;
      if (overflow > 0) {
        uint64_t large = PyLong_AsUnsignedLongLong(value);
        if (large == UINT64_MAX && PyErr_Occurred())
          return false;
        put_scalar(reading, TAG_U64, large);
      } else {
        put_scalar(reading, number >= INT32_MIN && number <= INT32_MAX ? TAG_I32 : TAG_I64, (uint64_t)number);
      }
    } else if (PyBool_Check(value)) {
      put_scalar(reading, TAG_BOOL, value == Py_True);
    } else if (PyFloat_CheckExact(value)) {
      float single = (float)PyFloat_AS_DOUBLE(value);
      uint32_t bits;
      memcpy(&bits, &single, sizeof bits);
      put_scalar(reading, TAG_FP32, bits);
    } else if (value == Py_None || (PyObject *)Py_TYPE(value) == self->constexpr_type) {
      put(reading, TAG_CONSTEXPR);
    } else if (PyTuple_Check(value)) {
      put(reading, TAG_OPEN);
      if (!read_arguments(self, value, reading, depth + 1))
        return false;
      put(reading, TAG_CLOSE);
    } else {
      return false;
    }
  }
  return !reading->overflow;
}

// A tuple (key, bytes), or NULL with or without an exception set: without one, the arguments are not for this path.
static PyObject *table_key(Dispatcher *self, PyObject *key, PyObject *args, Reading *reading) {
  reading->num_words = reading->num_scalars = reading->num_addresses = 0;
  reading->has_tensor = reading->overflow = false;
  if (!PyTuple_Check(args) || !read_arguments(self, args, reading, 0) || !reading->has_tensor) {
    PyErr_Clear(); // an attribute or conversion error says "not for this path": the Python path repeats it in words
    return NULL;
  }
  PyObject *bytes = PyBytes_FromStringAndSize((char *)reading->words, reading->num_words * sizeof(uint64_t));
  if (!bytes)
    return NULL;
  PyObject *result = PyTuple_Pack(2, key, bytes);
  Py_DECREF(bytes);
  return result;
}

// 1: a hook is set; 0: none; -1: error. An empty HookChain (Triton's default) is no hook.
static int has_hook(Dispatcher *self, PyObject *name) {
  PyObject *hook = PyObject_GetAttr(self->runtime, name);
  if (!hook)
    return -1;
  int result = hook != Py_None;
  if ((PyObject *)Py_TYPE(hook) == self->hook_chain) {
    PyObject *calls = PyObject_GetAttr(hook, calls_name);
    result = calls ? PyObject_IsTrue(calls) : -1;
    Py_XDECREF(calls);
  }
  Py_DECREF(hook);
  return result;
}

// false: not a tuple of one to three ints in range for this path.
static bool read_grid(PyObject *grid, uint32_t out[3]) {
  static const long limits[3] = {INT32_MAX, 65535, 65535};
  if (!PyTuple_Check(grid) || PyTuple_GET_SIZE(grid) < 1 || PyTuple_GET_SIZE(grid) > 3)
    return false;
  out[0] = out[1] = out[2] = 1;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(grid); ++i) {
    PyObject *item = PyTuple_GET_ITEM(grid, i);
    int overflow;
    if (!PyLong_CheckExact(item))
      return false;
    long extent = PyLong_AsLongAndOverflow(item, &overflow);
    if (overflow || extent < 0 || extent > limits[i])
      return false;
    out[i] = (uint32_t)extent;
  }
  return true;
}

// Puts the addresses of these tensors among the parameters, where they are not those that the parameters were made for.
static int put_addresses(Dispatcher *self, Binding *binding, char *block, const Reading *reading) {
  const Place *places = (const Place *)PyBytes_AS_STRING(binding->places);
  const uint64_t *known = (const uint64_t *)PyBytes_AS_STRING(binding->addresses);
  Py_ssize_t num_places = PyBytes_GET_SIZE(binding->places) / sizeof(Place);
  for (Py_ssize_t i = 0; i < num_places; ++i) {
    void *address = reading->addresses[places[i].tensor];
    if ((uint64_t)(uintptr_t)address == known[places[i].tensor])
      continue;
    if (places[i].is_map) {
      int code = self->replace_address(block + places[i].offset, address);
      if (code)
        return code;
    } else {
      memcpy(block + places[i].offset, &address, sizeof address);
    }
  }
  return 0;
}

// How to encode one tensor map anew, for a tensor with other extents and strides: the tensor's number in a call, the map's offset among the
// parameters, and what cuTensorMapEncodeTiled takes; `corrected`: this driver sets a wrong bit for small tensors (encoding.py says which).
typedef struct {
  uint32_t owner, offset, dtype, rank, itemsize, swizzle, promotion, fill, corrected, box[MAX_RANK];
} Recipe;

typedef struct {
  const Recipe *recipe;
  void *address;
  int64_t extents[MAX_RANK], strides[MAX_RANK]; // in elements, as torch orders them
} NewMap;

// false: not for this path, as TMA cannot address the tensor, or only with other strides of dimensions of extent 1.
static bool read_extents(Dispatcher *self, void *impl, NewMap *map) {
  int64_t dim, *extents, *strides, rank = map->recipe->rank, itemsize = map->recipe->itemsize;
  const TensorReader *get = &self->tensor;
  if (get->dim(&impl, &dim) || dim != rank || get->sizes(&impl, &extents) || get->strides(&impl, &strides) || strides[rank - 1] != 1)
    return false;
  for (int64_t i = 0; i < rank; ++i) {
    int64_t bytes = strides[i] * itemsize;
    if (extents[i] < 1 || extents[i] > INT32_MAX || strides[i] < 1 || strides[i] >= MAX_STRIDE_BYTES || (i + 1 < rank && bytes % COPY_BYTES) ||
        bytes >= MAX_STRIDE_BYTES)
      return false;
    map->extents[i] = extents[i];
    map->strides[i] = strides[i];
  }
  return true;
}

// Puts a map of these extents among the parameters, and behind it extents (int32) and strides (int64).
static int put_map(Dispatcher *self, const NewMap *map, char *block) {
  const Recipe *recipe = map->recipe;
  const uint32_t apart[MAX_RANK] = {1, 1, 1, 1, 1};
  uint64_t extents[MAX_RANK], strides[MAX_RANK], span = 0;
  uint32_t rank = recipe->rank, place = recipe->offset + MAP_BYTES;
  for (uint32_t i = 0; i < rank; ++i) {
    int32_t extent = (int32_t)map->extents[i];
    extents[rank - 1 - i] = (uint64_t)extent;
    strides[rank - 1 - i] = (uint64_t)(map->strides[i] * recipe->itemsize);
    span += ((uint64_t)extent - 1) * strides[rank - 1 - i];
    memcpy(block + place, &extent, sizeof extent);
    place += sizeof extent;
  }
  place = (place + 7) & ~7u;
  memcpy(block + place, map->strides, rank * sizeof(int64_t));
  char *data = block + recipe->offset;
  int code = self->encode_tiled(data, (int)recipe->dtype, rank, map->address, extents, strides + 1, recipe->box, apart, 0, (int)recipe->swizzle,
                                (int)recipe->promotion, (int)recipe->fill);
  if (!code && recipe->corrected && span + 1 < SMALL_BYTES)
    ((uint64_t *)data)[1] &= ~(UINT64_C(1) << 21);
  return code;
}

// The driver's code; `call` says which of its functions gave it.
static int launch_binding(Dispatcher *self, Binding *binding, const uint32_t grid[3], void *stream, const Reading *reading, const NewMap *maps,
                          int num_maps, const char **call) {
  Py_ssize_t block_bytes = PyBytes_GET_SIZE(binding->block), num_parameters = PyBytes_GET_SIZE(binding->offsets) / 4;
  uintptr_t unaligned = (uintptr_t)alloca(block_bytes + PARAMETER_ALIGNMENT);
  char *block = (char *)((unaligned + PARAMETER_ALIGNMENT - 1) & ~(uintptr_t)(PARAMETER_ALIGNMENT - 1));
  void **parameters = alloca(num_parameters * sizeof(void *));
  memcpy(block, PyBytes_AS_STRING(binding->block), block_bytes);
  const uint32_t *offsets = (const uint32_t *)PyBytes_AS_STRING(binding->offsets);
  for (Py_ssize_t i = 0; i < num_parameters; ++i)
    parameters[i] = block + offsets[i];
  const uint32_t *slots = (const uint32_t *)PyBytes_AS_STRING(binding->slots);
  for (int i = 0; i < reading->num_scalars; ++i)
    memcpy(block + slots[2 * i], &reading->scalars[i], slots[2 * i + 1]); // little endian: the low bytes come first
  LaunchConfig config = binding->config;
  config.grid[0] = grid[0] * binding->num_ctas;
  config.grid[1] = grid[1];
  config.grid[2] = grid[2];
  config.stream = stream;
  config.attributes = binding->attributes;

  int code;
  Py_BEGIN_ALLOW_THREADS; // the driver may wait for room in its queue
  void *current = NULL;
  code = self->context_get(&current);
  bool elsewhere = current != binding->context; // another device is current, or this thread has no context yet
  if (!code && elsewhere)
    code = self->context_set(binding->context);
  if (!code && (code = put_addresses(self, binding, block, reading)))
    *call = "cuTensorMapReplaceAddress";
  for (int i = 0; !code && i < num_maps; ++i)
    if ((code = put_map(self, &maps[i], block)))
      *call = "cuTensorMapEncodeTiled";
  if (!code) {
    code = self->launch_kernel(&config, binding->function, parameters, NULL);
    if (elsewhere && current)
      self->context_set(current);
  }
  Py_END_ALLOW_THREADS;
  return code;
}

static bool fits_binding(const Binding *binding, const uint32_t grid[3], const Reading *reading) {
  return (uint64_t)grid[0] * binding->num_ctas <= INT32_MAX && reading->num_scalars * 8 == PyBytes_GET_SIZE(binding->slots) &&
         reading->num_addresses * 8 == PyBytes_GET_SIZE(binding->addresses);
}

// Launches on the current stream of the binding's device. false: with an exception set.
static bool launch_on_stream(Dispatcher *self, Binding *binding, const uint32_t grid[3], const Reading *reading, const NewMap *maps, int num_maps) {
  PyObject *stream = PyObject_CallOneArg(self->stream_of, binding->device);
  if (!stream)
    return false;
  void *stream_handle = PyLong_AsVoidPtr(stream);
  Py_DECREF(stream);
  if (PyErr_Occurred())
    return false;
  binding->used = 1;
  const char *call = "cuLaunchKernelEx";
  int code = launch_binding(self, binding, grid, stream_handle, reading, maps, num_maps, &call);
  if (!code)
    return true;
  PyObject *ignored = PyObject_CallFunction(self->raise_error, "is", code, call);
  Py_XDECREF(ignored);
  if (!PyErr_Occurred())
    PyErr_Format(PyExc_RuntimeError, "%s failed with code %d", call, code);
  return false;
}

static PyObject *Dispatcher_launch(Dispatcher *self, PyObject *const *args, Py_ssize_t count) {
  if (count != 3)
    return PyErr_Format(PyExc_TypeError, "launch(grid, args, key) takes 3 arguments, got %zd", count);
  uint32_t grid[3];
  if (!read_grid(args[0], grid))
    Py_RETURN_FALSE;
  if (!grid[0] || !grid[1] || !grid[2])
    Py_RETURN_TRUE; // no block to run
  int hooks = has_hook(self, enter_name);
  if (!hooks)
    hooks = has_hook(self, exit_name);
  if (hooks)
    return hooks < 0 ? NULL : Py_NewRef(Py_False);

  Reading reading;
  PyObject *key = table_key(self, args[2], args[1], &reading);
  if (!key) {
    if (PyErr_Occurred())
      return NULL;
    Py_RETURN_FALSE;
  }
  Binding *binding = (Binding *)PyDict_GetItemWithError(self->table, key);
  Py_XINCREF(binding); // another thread may evict it while the driver runs
  Py_DECREF(key);
  if (!binding) {
    if (PyErr_Occurred())
      return NULL;
    Py_RETURN_FALSE;
  }
  PyObject *result = NULL;
  if (!fits_binding(binding, grid, &reading))
    result = Py_NewRef(Py_False);
  else if (launch_on_stream(self, binding, grid, &reading, NULL, 0))
    result = Py_NewRef(Py_True);
  Py_DECREF(binding);
  return result;
}

// ---- Bound: a prebuilt launch on a grid, with its numbers, of tensors that are still to come ---------------------------

typedef struct {
  PyObject_HEAD
  vectorcallfunc call;
  Dispatcher *dispatcher;
  Binding *binding;
  PyObject *fallback; // a function of the tensors that does the same, where this path has to decline
  uint32_t grid[3];
  int num_tensors, num_addresses, num_scalars, num_recipes;
  Recipe recipes[MAX_RECIPES]; // of tensors whose extents and strides may differ from call to call
  uint8_t owners[MAX_TENSORS]; // which tensor of a call has the address
  bool is_aligned[MAX_TENSORS];
  int32_t device_index;
  uint64_t scalars[MAX_SCALARS];
} Bound;

// The address of a tensor on the device of the launch that is aligned as the first was; false: not for this path.
static bool address_of(const Bound *self, PyObject *tensor, int number, void **impl, void **address) {
  int32_t device_index;
  *impl = is_plain_tensor(self->dispatcher, tensor) ? impl_of(self->dispatcher, tensor, &device_index) : NULL;
  return *impl && device_index == self->device_index && !self->dispatcher->tensor.data_ptr(impl, address) &&
         ((uintptr_t)*address % POINTER_ALIGNMENT == 0) == self->is_aligned[number];
}

static PyObject *Bound_call(Bound *self, PyObject *const *args, size_t flags, PyObject *names) {
  Py_ssize_t count = PyVectorcall_NARGS(flags);
  if (names || count != self->num_tensors)
    return PyErr_Format(PyExc_TypeError, "a bound launch takes %d tensors, by position", self->num_tensors);
  Dispatcher *dispatcher = self->dispatcher;
  int hooks = has_hook(dispatcher, enter_name);
  if (!hooks)
    hooks = has_hook(dispatcher, exit_name);
  if (hooks < 0)
    return NULL;
  void *impls[MAX_TENSORS], *addresses[MAX_TENSORS];
  NewMap maps[MAX_RECIPES];
  bool fits = !hooks;
  for (int i = 0; fits && i < count; ++i)
    fits = address_of(self, args[i], i, &impls[i], &addresses[i]);
  for (int i = 0; fits && i < self->num_recipes; ++i) {
    uint32_t owner = self->recipes[i].owner;
    maps[i].recipe = &self->recipes[i];
    maps[i].address = addresses[owner];
    fits = read_extents(dispatcher, impls[owner], &maps[i]);
  }
  if (!fits) {
    PyErr_Clear();
    return PyObject_Vectorcall(self->fallback, args, count, NULL);
  }
  Reading reading;
  reading.num_scalars = self->num_scalars;
  memcpy(reading.scalars, self->scalars, self->num_scalars * sizeof(uint64_t));
  for (int i = 0; i < self->num_addresses; ++i)
    reading.addresses[i] = addresses[self->owners[i]];
  return launch_on_stream(dispatcher, self->binding, self->grid, &reading, maps, self->num_recipes) ? Py_NewRef(Py_None) : NULL;
}

static int Bound_traverse(Bound *self, visitproc visit, void *arg) {
  Py_VISIT(self->dispatcher);
  Py_VISIT(self->binding);
  Py_VISIT(self->fallback);
  return 0;
}

static int Bound_clear(Bound *self) {
  Py_CLEAR(self->dispatcher);
  Py_CLEAR(self->binding);
  Py_CLEAR(self->fallback);
  return 0;
}

static void Bound_dealloc(Bound *self) {
  PyObject_GC_UnTrack(self);
  Bound_clear(self);
  Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyTypeObject BoundType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "tritonkittens_launch.Bound",
    .tp_doc = "A prebuilt launch as a function of its tensors.",
    .tp_basicsize = sizeof(Bound),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(Bound, call),
    .tp_call = PyVectorcall_Call,
    .tp_traverse = (traverseproc)Bound_traverse,
    .tp_clear = (inquiry)Bound_clear,
    .tp_dealloc = (destructor)Bound_dealloc,
};

static PyObject *Dispatcher_bind(Dispatcher *self, PyObject *const *args, Py_ssize_t count) {
  if (count != 6 || !PyTuple_Check(args[3]) || !PyBytes_Check(args[5]))
    return PyErr_Format(PyExc_TypeError, "bind(grid, args, key, owners, fallback, recipes) takes 6 arguments, the fourth a tuple, the last bytes");
  if (PyBytes_GET_SIZE(args[5]) > (Py_ssize_t)(MAX_RECIPES * sizeof(Recipe)) || PyBytes_GET_SIZE(args[5]) % sizeof(Recipe))
    Py_RETURN_NONE;
  uint32_t grid[3];
  Reading reading;
  if (!read_grid(args[0], grid) || !grid[0] || !grid[1] || !grid[2])
    Py_RETURN_NONE;
  PyObject *key = table_key(self, args[2], args[1], &reading);
  if (!key && PyErr_Occurred())
    return NULL;
  Binding *binding = key ? (Binding *)PyDict_GetItemWithError(self->table, key) : NULL;
  Py_XDECREF(key);
  if (!binding || !fits_binding(binding, grid, &reading) || PyTuple_GET_SIZE(args[3]) != reading.num_addresses) {
    if (PyErr_Occurred())
      return NULL;
    Py_RETURN_NONE;
  }
  Bound *bound = (Bound *)BoundType.tp_alloc(&BoundType, 0);
  if (!bound)
    return NULL;
  bound->call = (vectorcallfunc)Bound_call;
  bound->dispatcher = (Dispatcher *)Py_NewRef(self);
  bound->binding = (Binding *)Py_NewRef(binding);
  bound->fallback = Py_NewRef(args[4]);
  memcpy(bound->grid, grid, sizeof grid);
  bound->device_index = (int32_t)PyLong_AsLong(binding->device);
  bound->num_addresses = reading.num_addresses;
  bound->num_scalars = reading.num_scalars;
  memcpy(bound->scalars, reading.scalars, reading.num_scalars * sizeof(uint64_t));
  for (int i = 0; i < reading.num_addresses; ++i) {
    long owner = PyLong_AsLong(PyTuple_GET_ITEM(args[3], i));
    if (owner < 0 || owner >= MAX_TENSORS) {
      Py_DECREF(bound);
      return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "owner %ld of tensor %d", owner, i);
    }
    bound->owners[i] = (uint8_t)owner;
    bound->is_aligned[owner] = (uintptr_t)reading.addresses[i] % POINTER_ALIGNMENT == 0;
    if (owner >= bound->num_tensors)
      bound->num_tensors = (int)owner + 1;
  }
  bound->num_recipes = (int)(PyBytes_GET_SIZE(args[5]) / sizeof(Recipe));
  memcpy(bound->recipes, PyBytes_AS_STRING(args[5]), PyBytes_GET_SIZE(args[5]));
  for (int i = 0; i < bound->num_recipes; ++i)
    if (bound->recipes[i].owner >= (uint32_t)bound->num_tensors || bound->recipes[i].rank < 1 || bound->recipes[i].rank > MAX_RANK) {
      PyErr_Format(PyExc_ValueError, "recipe %d is of tensor %u with %u dimensions", i, bound->recipes[i].owner, bound->recipes[i].rank);
      Py_DECREF(bound);
      return NULL;
    }
  return (PyObject *)bound;
}

static PyObject *Dispatcher_table_key(Dispatcher *self, PyObject *const *args, Py_ssize_t count) {
  if (count != 2)
    return PyErr_Format(PyExc_TypeError, "table_key(args, key) takes 2 arguments, got %zd", count);
  Reading reading;
  PyObject *key = table_key(self, args[1], args[0], &reading);
  if (!key && !PyErr_Occurred())
    Py_RETURN_NONE;
  return key;
}

// Everything about tensors that a call is planned by: dtype, device, place within 16 bytes, shape, strides. Their values and addresses are not in it.
// None, an operand that is left out, is told apart from all tensors.
static PyObject *Dispatcher_signature(Dispatcher *self, PyObject *const *args, Py_ssize_t count) {
  Reading reading;
  reading.num_words = 0;
  reading.overflow = false;
  const TensorReader *get = &self->tensor;
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (args[i] == Py_None) {
      put(&reading, POINTER_ALIGNMENT); // no tensor is there within so many bytes
      continue;
    }
    int32_t dtype, device_index;
    int64_t dim, *sizes, *strides;
    void *impl = is_plain_tensor(self, args[i]) ? impl_of(self, args[i], &device_index) : NULL, *address;
    if (!impl || get->dtype(&impl, &dtype) || get->data_ptr(&impl, &address) || get->dim(&impl, &dim) || get->sizes(&impl, &sizes) ||
        get->strides(&impl, &strides)) {
      PyErr_Clear();
      Py_RETURN_NONE;
    }
    // The place within 16 bytes, not only whether that is 0: the products of operands that TMA cannot address read words around it
    uint64_t place = (uintptr_t)address % POINTER_ALIGNMENT;
    put(&reading, place | (uint64_t)(uint8_t)dim << 8 | (uint64_t)(uint16_t)dtype << 16 | (uint64_t)(uint32_t)device_index << 32);
    for (int64_t axis = 0; axis < dim; ++axis) {
      put(&reading, (uint64_t)sizes[axis]);
      put(&reading, (uint64_t)strides[axis]);
    }
  }
  if (reading.overflow)
    Py_RETURN_NONE;
  return PyBytes_FromStringAndSize((char *)reading.words, reading.num_words * sizeof(uint64_t));
}

static PyObject *Dispatcher_read(Dispatcher *self, PyObject *args) {
  Reading reading = {.num_words = 0};
  if (!read_arguments(self, args, &reading, 0)) {
    PyErr_Clear();
    Py_RETURN_NONE;
  }
  PyObject *words = PyTuple_New(reading.num_words + reading.num_addresses);
  for (int i = 0; words && i < reading.num_words; ++i)
    PyTuple_SET_ITEM(words, i, PyLong_FromUnsignedLongLong(reading.words[i]));
  for (int i = 0; words && i < reading.num_addresses; ++i)
    PyTuple_SET_ITEM(words, reading.num_words + i, PyLong_FromVoidPtr(reading.addresses[i]));
  return words;
}

static PyObject *Dispatcher_new(PyTypeObject *type, PyObject *args, PyObject *kwds) {
  unsigned long long launch_kernel, context_get, context_set, replace_address, encode_tiled, tensor[7];
  int device_type;
  PyObject *tensor_types, *global_type, *constexpr_type, *stream_of, *runtime, *hook_chain, *raise_error, *table;
  if (!PyArg_ParseTuple(args, "(KKKKK)(KKKKKKK)i(O!OO)OOOOO!", &launch_kernel, &context_get, &context_set, &replace_address, &encode_tiled, tensor, tensor + 1, tensor + 2,
                        tensor + 3, tensor + 4, tensor + 5, tensor + 6, &device_type, &PyTuple_Type, &tensor_types, &global_type,
                        &constexpr_type, &stream_of, &runtime, &hook_chain, &raise_error, &PyDict_Type, &table))
    return NULL;
  Dispatcher *self = (Dispatcher *)type->tp_alloc(type, 0);
  if (!self)
    return NULL;
  self->launch_kernel = (LaunchKernelEx)(uintptr_t)launch_kernel;
  self->replace_address = (TensorMapReplaceAddress)(uintptr_t)replace_address;
  self->encode_tiled = (TensorMapEncodeTiled)(uintptr_t)encode_tiled;
  self->context_get = (ContextGetCurrent)(uintptr_t)context_get;
  self->context_set = (ContextSetCurrent)(uintptr_t)context_set;
  self->tensor = (TensorReader){
      (TensorGetPointer)(uintptr_t)tensor[0], (TensorGetInt64)(uintptr_t)tensor[1],      (TensorGetInt64Array)(uintptr_t)tensor[2],
      (TensorGetInt64Array)(uintptr_t)tensor[3], (TensorGetInt32)(uintptr_t)tensor[4], (TensorGetInt32)(uintptr_t)tensor[5],
      (TensorGetInt32)(uintptr_t)tensor[6]};
  self->device_type = device_type;
  self->tensor_types = Py_NewRef(tensor_types);
  self->global_type = Py_NewRef(global_type);
  self->constexpr_type = Py_NewRef(constexpr_type);
  self->stream_of = Py_NewRef(stream_of);
  self->runtime = Py_NewRef(runtime);
  self->hook_chain = Py_NewRef(hook_chain);
  self->raise_error = Py_NewRef(raise_error);
  self->table = Py_NewRef(table);
  return (PyObject *)self;
}

static int Dispatcher_traverse(Dispatcher *self, visitproc visit, void *arg) {
  Py_VISIT(self->stream_of);
  Py_VISIT(self->runtime);
  Py_VISIT(self->raise_error);
  Py_VISIT(self->table);
  return 0;
}

static int Dispatcher_clear(Dispatcher *self) {
  Py_CLEAR(self->tensor_types);
  Py_CLEAR(self->global_type);
  Py_CLEAR(self->constexpr_type);
  Py_CLEAR(self->stream_of);
  Py_CLEAR(self->runtime);
  Py_CLEAR(self->hook_chain);
  Py_CLEAR(self->raise_error);
  Py_CLEAR(self->table);
  return 0;
}

static void Dispatcher_dealloc(Dispatcher *self) {
  PyObject_GC_UnTrack(self);
  Dispatcher_clear(self);
  Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMethodDef Dispatcher_methods[] = {
    {"launch", (PyCFunction)(void (*)(void))Dispatcher_launch, METH_FASTCALL,
     "launch(grid, args, key) -> bool: False when the Python path has to do it (nothing was launched)."},
    {"bind", (PyCFunction)(void (*)(void))Dispatcher_bind, METH_FASTCALL,
     "bind(grid, args, key, owners, fallback, recipes) -> launch(*tensors), or None: the launch that is known for these arguments, of tensors that stand in the\n"
     "place of those, the i-th of which is number owners[i] of a call. Of tensors of a call only addresses are read, and extents and strides where `recipes`\n"
     "(bytes: a Recipe for each map) say how to encode their maps anew."},
    {"table_key", (PyCFunction)(void (*)(void))Dispatcher_table_key, METH_FASTCALL,
     "table_key(args, key) -> (key, bytes), or None when the arguments are not for this path."},
    {"signature", (PyCFunction)(void (*)(void))Dispatcher_signature, METH_FASTCALL,
     "signature(*tensors) -> bytes: dtype, device, address % 16, shape and strides of each that is not None; None where one is no plain tensor on a device of\n"
     "this type."},
    {"read", (PyCFunction)Dispatcher_read, METH_O, "read(args) -> the words that describe the arguments, and the tensors' addresses, or None."},
    {NULL},
};

static PyTypeObject DispatcherType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "tritonkittens_launch.Dispatcher",
    .tp_doc = "Dispatcher(driver, tensor, device_type, types, stream_of, runtime, hook_chain, raise_error, table): finds and launches.",
    .tp_basicsize = sizeof(Dispatcher),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = Dispatcher_new,
    .tp_traverse = (traverseproc)Dispatcher_traverse,
    .tp_clear = (inquiry)Dispatcher_clear,
    .tp_dealloc = (destructor)Dispatcher_dealloc,
    .tp_methods = Dispatcher_methods,
};

static struct PyModuleDef module_definition = {PyModuleDef_HEAD_INIT, .m_name = "tritonkittens_launch", .m_size = -1};

PyMODINIT_FUNC PyInit_tritonkittens_launch(void) {
  if (PyType_Ready(&BindingType) < 0 || PyType_Ready(&DispatcherType) < 0 || PyType_Ready(&BoundType) < 0)
    return NULL;
  cdata_name = PyUnicode_InternFromString("_cdata");
  enter_name = PyUnicode_InternFromString("launch_enter_hook");
  exit_name = PyUnicode_InternFromString("launch_exit_hook");
  calls_name = PyUnicode_InternFromString("calls");
  PyObject *module = PyModule_Create(&module_definition);
  if (!module || !cdata_name || !enter_name || !exit_name || !calls_name ||
      PyModule_AddObjectRef(module, "Binding", (PyObject *)&BindingType) < 0 ||
      PyModule_AddObjectRef(module, "Dispatcher", (PyObject *)&DispatcherType) < 0) {
    Py_XDECREF(module);
    return NULL;
  }
  return module;
}
