/* The calls of Python functions, told to Python once for each function and number: see call_log.py. A trace function in
 * Python makes every line of every package slow, since the interpreter looks for line events then. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

typedef struct {
    PyObject *code; /* kept alive by its owner */
    long long last; /* the number under which it was told, or FOREIGN */
} Entry;

#define FOREIGN (-1)

static Entry *entries;
static size_t size, used;
static Py_buffer number; /* 32 bits, shared with other processes */
static PyObject *enter, *leave;
static int importing; /* modules that are being imported: then a call may belong to one of them */

static Entry *find(PyObject *code)
{
    size_t place = ((size_t)code >> 4) * 0x9E3779B97F4A7C15ull & (size - 1);
    while (entries[place].code && entries[place].code != code)
        place = (place + 1) & (size - 1);
    return &entries[place];
}

static int grow(void)
{
    Entry *old = entries;
    size_t count = size;
    Entry *new = calloc(2 * count, sizeof(Entry));
    if (!new)
        return -1;
    entries = new;
    size = 2 * count;
    for (size_t i = 0; i < count; i++)
        if (old[i].code)
            *find(old[i].code) = old[i];
    free(old);
    return 0;
}

/* Call a function of Python with a frame. An error, as where no call may be nested deeper, loses one note. */
static void tell(PyObject *function, PyFrameObject *frame)
{
    PyObject *type, *value, *traceback, *result;
    PyErr_Fetch(&type, &value, &traceback);
    result = PyObject_CallOneArg(function, (PyObject *)frame);
    if (result)
        Py_DECREF(result);
    else
        PyErr_Clear();
    PyErr_Restore(type, value, traceback);
}

static int on_event(PyObject *Py_UNUSED(self), PyFrameObject *frame, int what, PyObject *Py_UNUSED(argument))
{
    PyCodeObject *code;
    Entry *entry;
    if (what == PyTrace_CALL) {
        code = PyFrame_GetCode(frame);
        entry = find((PyObject *)code);
        if (!entry->code || (entry->last != FOREIGN && (importing || entry->last != *(unsigned int *)number.buf)))
            tell(enter, frame);
        Py_DECREF(code);
    } else if (what == PyTrace_RETURN && importing) {
        code = PyFrame_GetCode(frame);
        if (PyUnicode_CompareWithASCIIString(code->co_name, "<module>") == 0)
            tell(leave, frame);
        Py_DECREF(code);
    }
    return 0;
}

static PyObject *start(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    PyObject *buffer;
    if (!PyArg_ParseTuple(arguments, "OOO", &enter, &leave, &buffer))
        return NULL;
    if (PyObject_GetBuffer(buffer, &number, PyBUF_SIMPLE))
        return NULL;
    Py_INCREF(enter);
    Py_INCREF(leave);
    size = 1 << 15;
    entries = calloc(size, sizeof(Entry));
    if (!entries)
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyObject *follow(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(arguments))
{
    PyEval_SetProfile(on_event, NULL);
    Py_RETURN_NONE;
}

static PyObject *note(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    PyObject *code;
    long long last;
    Entry *entry;
    if (!PyArg_ParseTuple(arguments, "OL", &code, &last))
        return NULL;
    if (2 * used > size && grow())
        return PyErr_NoMemory();
    entry = find(code);
    used += !entry->code;
    entry->code = code;
    entry->last = last;
    Py_RETURN_NONE;
}

static PyObject *import_depth(PyObject *Py_UNUSED(module), PyObject *depth)
{
    importing = (int)PyLong_AsLong(depth);
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"start", start, METH_VARARGS, "start(enter, leave, number): functions that get frames, and where the number stands"},
    {"follow", follow, METH_NOARGS, "follow(): from now on, in this thread"},
    {"note", note, METH_VARARGS, "note(code, number): that a code object was told under a number"},
    {"import_depth", import_depth, METH_O, "import_depth(n): how many modules are being imported"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "calls", .m_size = -1, .m_methods = methods};

PyMODINIT_FUNC PyInit_calls(void)
{
    return PyModule_Create(&definition);
}
