/* The wire codec's hot path: prefix, control records and row records, as ``fields``, ``canonical``, ``prefix``, ``frame``
 * and ``rows`` do them in Python.
 *
 * Every function answers valid input only. For anything else (and for what it does not know: text, subclasses, large
 * rows) it gives None, False or 0 and has changed nothing, and the caller does the work again in Python, which finds
 * the reason. So errors have one source, and what is accepted here must be exactly what Python accepts: a table of
 * fields, made from a record's LAYOUT, says the kinds and ranges.
 *
 * Bounds: every read and write is checked against the end of its buffer; nothing is sized by a value that was read,
 * except tuples, whose count the table limits first.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>
#include <structmember.h>

#include "xxh3.h"

#define INTERFACE 4 /* native.py checks it: raise it with every change of a signature or of the tables */
#define PREFIX_BYTES 48
#define CONTROL_BYTES_MAX 4096
#define ALIGNMENT 64
#define RECORD_BYTES 16
#define MAJOR 2
#define MINOR 0
#define CONFIDENCE_MAX (1u << 24)
#define VOCAB_MAX 0x7fffffffu
#define ROWS_MAX 32
#define CRC32C 1 /* the registry's checksum ids */
#define XXH3_64 2
#define CHECKSUM_BYTES 8
#define PIECE 3072 /* bytes of a step of a copy that is hashed: both ends stay in the first-level cache */

/* CRC32C: eight bytes a step, or with the CPU's own instruction. Both work on the inverted register. */

static uint32_t crc_table[8][256];

static void make_crc_table(void) {
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78u : 0);
        crc_table[0][byte] = crc;
    }
    for (int table = 1; table < 8; table++)
        for (int byte = 0; byte < 256; byte++) {
            uint32_t before = crc_table[table - 1][byte];
            crc_table[table][byte] = before >> 8 ^ crc_table[0][before & 255];
        }
}

static uint32_t load32(const uint8_t *at) {
    return at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

static uint64_t load64(const uint8_t *at) { return load32(at) | (uint64_t)load32(at + 4) << 32; }

static void store(uint8_t *at, uint64_t value, int bytes) {
    for (int i = 0; i < bytes; i++)
        at[i] = (uint8_t)(value >> 8 * i);
}

static uint32_t crc32c_by_tables(uint32_t crc, const uint8_t *at, Py_ssize_t count) {
    for (; count >= 8; at += 8, count -= 8) {
        uint32_t low = crc ^ load32(at), high = load32(at + 4);
        crc = crc_table[7][low & 255] ^ crc_table[6][low >> 8 & 255] ^ crc_table[5][low >> 16 & 255] ^
              crc_table[4][low >> 24] ^ crc_table[3][high & 255] ^ crc_table[2][high >> 8 & 255] ^
              crc_table[1][high >> 16 & 255] ^ crc_table[0][high >> 24];
    }
    for (; count > 0; at++, count--)
        crc = crc >> 8 ^ crc_table[0][(crc ^ *at) & 255];
    return crc;
}

static uint32_t (*crc32c_step)(uint32_t, const uint8_t *, Py_ssize_t) = crc32c_by_tables;

#if defined(__x86_64__)

#define LANE 1024 /* bytes; three lanes keep the crc unit busy, which takes three cycles for a step and starts one in each */

static uint32_t lane_table[4][256]; /* what LANE zero bytes make of each byte of a crc */

static void make_lane_table(void) {
    static const uint8_t zeros[LANE];
    for (int at = 0; at < 4; at++)
        for (uint32_t byte = 0; byte < 256; byte++)
            lane_table[at][byte] = crc32c_by_tables(byte << 8 * at, zeros, LANE);
}

static uint32_t past_lane(uint32_t crc) {
    return lane_table[0][crc & 255] ^ lane_table[1][crc >> 8 & 255] ^ lane_table[2][crc >> 16 & 255] ^
           lane_table[3][crc >> 24];
}

__attribute__((target("sse4.2"))) static uint32_t crc32c_by_cpu(uint32_t start, const uint8_t *at, Py_ssize_t count) {
    uint64_t crc = start, word, second, third;
    for (; count >= 3 * LANE; at += 3 * LANE, count -= 3 * LANE) {
        second = third = 0;
        for (int i = 0; i < LANE; i += 8) {
            memcpy(&word, at + i, 8);
            crc = _mm_crc32_u64(crc, word);
            memcpy(&word, at + LANE + i, 8);
            second = _mm_crc32_u64(second, word);
            memcpy(&word, at + 2 * LANE + i, 8);
            third = _mm_crc32_u64(third, word);
        }
        crc = past_lane(past_lane((uint32_t)crc) ^ (uint32_t)second) ^ (uint32_t)third;
    }
    for (; count >= 8; at += 8, count -= 8) {
        memcpy(&word, at, 8);
        crc = _mm_crc32_u64(crc, word);
    }
    for (; count > 0; at++, count--)
        crc = _mm_crc32_u8((uint32_t)crc, *at);
    return (uint32_t)crc;
}

#endif

static void choose_crc32c(void) {
    make_crc_table();
#if defined(__x86_64__)
    make_lane_table();
    if (__builtin_cpu_supports("sse4.2"))
        crc32c_step = crc32c_by_cpu;
#endif
}

static uint32_t crc32c(uint32_t crc, const uint8_t *at, Py_ssize_t count) { return ~crc32c_step(~crc, at, count); }

/* The checksum of a body, of bytes that may come in pieces. */

typedef struct {
    uint64_t kind;
    uint32_t crc;
    Xxh3 xxh3;
} Sum;

static int sum_begin(Sum *sum, uint64_t kind) {
    sum->kind = kind, sum->crc = 0;
    xxh3_begin(&sum->xxh3);
    return kind == CRC32C || kind == XXH3_64;
}

static void sum_update(Sum *sum, const uint8_t *at, Py_ssize_t count) {
    if (sum->kind == CRC32C)
        sum->crc = crc32c(sum->crc, at, count);
    else
        xxh3_update(&sum->xxh3, at, (size_t)count);
}

static void sum_end(const Sum *sum, uint8_t *to) {
    store(to, sum->kind == CRC32C ? sum->crc : xxh3_end(&sum->xxh3), CHECKSUM_BYTES);
}

/* A copy in short steps. memcpy has one instruction for a long one, which on some CPUs takes fifteen times as long when
 * the ends lie differently in their cache lines. */
static void copy(uint8_t *to, const uint8_t *from, Py_ssize_t count) {
    for (; count > PIECE; to += PIECE, from += PIECE, count -= PIECE)
        memcpy(to, from, PIECE);
    memcpy(to, from, (size_t)count);
}

static void copy_and_sum(Sum *sum, uint8_t *to, const uint8_t *from, Py_ssize_t count) {
    for (; count > 0; to += PIECE, from += PIECE, count -= PIECE) {
        Py_ssize_t now = count < PIECE ? count : PIECE;
        memcpy(to, from, (size_t)now);
        sum_update(sum, from, now);
    }
}

static Py_ssize_t aligned(Py_ssize_t count) { return (count + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }

static int all_zero(const uint8_t *at, Py_ssize_t count) {
    for (; count > 0; at++, count--)
        if (*at)
            return 0;
    return 1;
}

/* Tables of fields. */

typedef struct Table Table;

enum kind { UINT, CHOICE, BIN, RECORDS };

typedef struct {
    enum kind kind;
    Py_ssize_t offset;         /* of the attribute in the record */
    uint64_t minimum, maximum; /* of the value, of the bytes, or of the number of records */
    PyObject *type;            /* CHOICE: the enumeration */
    PyObject *choices;         /* CHOICE: a tuple of (number, member) */
    Table *item;               /* RECORDS */
} Field;

typedef struct {
    Py_ssize_t offset;
    PyObject *value;
} Default;

/* The fields of one record class. It lives as long as the class, and is not collected. */
struct Table {
    PyObject_HEAD
    PyTypeObject *type;
    Py_ssize_t field_count, default_count;
    Py_ssize_t bodies; /* index of the field that describes the frame's bodies, or -1 */
    Py_ssize_t length; /* of a descriptor: offset of its number of bytes, or -1 */
    Py_ssize_t sum_kind, sum; /* of a descriptor: offsets of its checksum's kind and of the checksum, or -1 */
    Field *fields;
    Default *defaults; /* attributes that do not travel */
};

static PyTypeObject *table_type;

static Py_ssize_t attribute_offset(PyObject *type, PyObject *name) {
    PyObject *found = PyObject_GetAttr(type, name);
    if (!found)
        return -1;
    Py_ssize_t offset = -1;
    if (Py_IS_TYPE(found, &PyMemberDescr_Type) && ((PyMemberDescrObject *)found)->d_member->type == T_OBJECT_EX)
        offset = ((PyMemberDescrObject *)found)->d_member->offset;
    else
        PyErr_Format(PyExc_TypeError, "%U is no slot of the record", name);
    Py_DECREF(found);
    return offset;
}

static int fill_field(Table *table, Py_ssize_t index, PyObject *plan) {
    Field *field = &table->fields[index];
    const char *kind;
    PyObject *name, *detail;
    unsigned long long minimum, maximum;
    if (!PyArg_ParseTuple(plan, "sUKKO", &kind, &name, &minimum, &maximum, &detail))
        return 0;
    field->minimum = minimum, field->maximum = maximum;
    field->offset = attribute_offset((PyObject *)table->type, name);
    if (field->offset < 0)
        return 0;
    if (!PyUnicode_CompareWithASCIIString(name, "body_bytes"))
        table->length = field->offset;
    if (!PyUnicode_CompareWithASCIIString(name, "checksum_kind"))
        table->sum_kind = field->offset;
    if (!PyUnicode_CompareWithASCIIString(name, "checksum"))
        table->sum = field->offset;
    if (!PyUnicode_CompareWithASCIIString(name, "bodies"))
        table->bodies = index;
    switch (kind[0]) {
    case 'u': field->kind = UINT; return 1;
    case 'b': field->kind = BIN; return maximum <= 255;
    case 'e':
        field->kind = CHOICE;
        return PyArg_ParseTuple(detail, "OO!", &field->type, &PyTuple_Type, &field->choices) &&
               (Py_INCREF(field->type), Py_INCREF(field->choices), 1);
    default:
        field->kind = RECORDS;
        if (!Py_IS_TYPE(detail, table_type) || maximum > 128)
            return 0;
        field->item = (Table *)Py_NewRef(detail);
        return 1;
    }
}

static int fill_table(Table *table, PyObject *plans, PyObject *defaults) {
    table->field_count = PyTuple_GET_SIZE(plans);
    table->default_count = PyTuple_GET_SIZE(defaults);
    table->fields = PyMem_Calloc(table->field_count + 1, sizeof(Field));
    table->defaults = PyMem_Calloc(table->default_count + 1, sizeof(Default));
    if (!table->fields || !table->defaults)
        return PyErr_NoMemory() != NULL;
    for (Py_ssize_t i = 0; i < table->field_count; i++)
        if (!fill_field(table, i, PyTuple_GET_ITEM(plans, i)))
            return 0;
    for (Py_ssize_t i = 0; i < table->default_count; i++) {
        PyObject *name, *value;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(defaults, i), "UO", &name, &value))
            return 0;
        table->defaults[i].offset = attribute_offset((PyObject *)table->type, name);
        if (table->defaults[i].offset < 0)
            return 0;
        table->defaults[i].value = Py_NewRef(value);
    }
    return 1;
}

/* Table(record class, ((kind, name, minimum, maximum, detail), ...), ((name, default), ...)) */
static PyObject *table_new(PyTypeObject *type, PyObject *arguments, PyObject *Py_UNUSED(keywords)) {
    PyObject *record, *plans, *defaults;
    if (!PyArg_ParseTuple(arguments, "O!O!O!", &PyType_Type, &record, &PyTuple_Type, &plans, &PyTuple_Type, &defaults))
        return NULL;
    Table *table = (Table *)type->tp_alloc(type, 0);
    if (!table)
        return NULL;
    table->type = (PyTypeObject *)Py_NewRef(record);
    table->bodies = table->length = table->sum_kind = table->sum = -1;
    if (!fill_table(table, plans, defaults)) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "a field that has no table");
        Py_DECREF(table);
        return NULL;
    }
    return (PyObject *)table;
}

static void table_dealloc(Table *table) {
    PyTypeObject *type = Py_TYPE(table);
    for (Py_ssize_t i = 0; table->fields && i < table->field_count; i++) {
        Py_XDECREF(table->fields[i].type);
        Py_XDECREF(table->fields[i].choices);
        Py_XDECREF(table->fields[i].item);
    }
    for (Py_ssize_t i = 0; table->defaults && i < table->default_count; i++)
        Py_XDECREF(table->defaults[i].value);
    PyMem_Free(table->fields);
    PyMem_Free(table->defaults);
    Py_XDECREF(table->type);
    type->tp_free(table);
    Py_DECREF(type);
}

static PyObject **attribute(PyObject *record, Py_ssize_t offset) { return (PyObject **)((char *)record + offset); }

/* Writing control. ``at`` NULL: only check. */

typedef struct {
    uint8_t *at, *end;
} Writer;

static int put_bytes(Writer *to, const void *bytes, Py_ssize_t count) {
    if (!to->at)
        return 1;
    if (to->end - to->at < count)
        return 0;
    memcpy(to->at, bytes, count);
    to->at += count;
    return 1;
}

/* A head byte and a big-endian number of ``bytes`` bytes. */
static int put_head(Writer *to, uint8_t head, uint64_t value, int bytes) {
    uint8_t encoded[9] = {head};
    for (int i = 0; i < bytes; i++)
        encoded[1 + i] = (uint8_t)(value >> 8 * (bytes - 1 - i));
    return put_bytes(to, encoded, 1 + bytes);
}

static int put_uint(Writer *to, uint64_t value) {
    if (value < 128)
        return put_head(to, (uint8_t)value, 0, 0);
    if (value <= UINT8_MAX)
        return put_head(to, 0xcc, value, 1);
    if (value <= UINT16_MAX)
        return put_head(to, 0xcd, value, 2);
    return value <= UINT32_MAX ? put_head(to, 0xce, value, 4) : put_head(to, 0xcf, value, 8);
}

static int put_array(Writer *to, Py_ssize_t count) {
    return count < 16 ? put_head(to, (uint8_t)(0x90 | count), 0, 0) : put_head(to, 0xdc, count, 2);
}

/* The value of an int, 0 for one that does not fit. */
static int as_uint(PyObject *value, uint64_t *number) {
    *number = PyLong_AsUnsignedLongLong(value);
    if (*number == (uint64_t)-1 && PyErr_Occurred()) {
        PyErr_Clear();
        return 0;
    }
    return 1;
}

static int put_record(Writer *to, Table *table, PyObject *record);

static int put_field(Writer *to, const Field *field, PyObject *value) {
    uint64_t number;
    switch (field->kind) {
    case UINT:
        return PyLong_CheckExact(value) && as_uint(value, &number) && field->minimum <= number &&
               number <= field->maximum && put_uint(to, number);
    case CHOICE: return (PyObject *)Py_TYPE(value) == field->type && as_uint(value, &number) && put_uint(to, number);
    case BIN:
        if (!PyBytes_CheckExact(value))
            return 0;
        number = PyBytes_GET_SIZE(value);
        return field->minimum <= number && number <= field->maximum && put_head(to, 0xc4, number, 1) &&
               put_bytes(to, PyBytes_AS_STRING(value), number);
    default:
        if (!PyTuple_CheckExact(value))
            return 0;
        number = PyTuple_GET_SIZE(value);
        if (number < field->minimum || number > field->maximum || !put_array(to, number))
            return 0;
        for (uint64_t i = 0; i < number; i++)
            if (!put_record(to, field->item, PyTuple_GET_ITEM(value, i)))
                return 0;
        return 1;
    }
}

static int put_record(Writer *to, Table *table, PyObject *record) {
    if (Py_TYPE(record) != table->type || !put_array(to, table->field_count))
        return 0;
    for (Py_ssize_t i = 0; i < table->field_count; i++) {
        PyObject *value = *attribute(record, table->fields[i].offset);
        if (!value || !put_field(to, &table->fields[i], value))
            return 0;
    }
    return 1;
}

/* The record that has these values. */
static int put_values(Writer *to, Table *table, PyObject *values) {
    if (PyTuple_GET_SIZE(values) != table->field_count || !put_array(to, table->field_count))
        return 0;
    for (Py_ssize_t i = 0; i < table->field_count; i++)
        if (!put_field(to, &table->fields[i], PyTuple_GET_ITEM(values, i)))
            return 0;
    return 1;
}

/* Reading control: the shortest forms alone. NULL without an exception: not valid. */

typedef struct {
    const uint8_t *at, *end;
} Reader;

static int take_number(Reader *from, int bytes, uint64_t *value) {
    if (from->end - from->at < bytes)
        return 0;
    *value = 0;
    for (int i = 0; i < bytes; i++)
        *value = *value << 8 | *from->at++;
    return 1;
}

static int take_uint(Reader *from, uint64_t *value) {
    if (from->at == from->end)
        return 0;
    uint8_t head = *from->at++;
    if (head < 128) {
        *value = head;
        return 1;
    }
    switch (head) {
    case 0xcc: return take_number(from, 1, value) && *value >= 128;
    case 0xcd: return take_number(from, 2, value) && *value > UINT8_MAX;
    case 0xce: return take_number(from, 4, value) && *value > UINT16_MAX;
    case 0xcf: return take_number(from, 8, value) && *value > UINT32_MAX;
    default: return 0;
    }
}

static int take_array(Reader *from, uint64_t *count) {
    if (from->at == from->end)
        return 0;
    uint8_t head = *from->at++;
    if (head >> 4 == 9) {
        *count = head & 15;
        return 1;
    }
    return head == 0xdc && take_number(from, 2, count) && *count >= 16;
}

static PyObject *take_record(Reader *from, Table *table);

static PyObject *take_records(Reader *from, const Field *field) {
    uint64_t count;
    if (!take_array(from, &count) || count < field->minimum || count > field->maximum)
        return NULL;
    PyObject *records = PyTuple_New((Py_ssize_t)count);
    for (uint64_t i = 0; records && i < count; i++) {
        PyObject *record = take_record(from, field->item);
        if (!record)
            Py_CLEAR(records);
        else
            PyTuple_SET_ITEM(records, i, record);
    }
    return records;
}

static PyObject *choice(const Field *field, uint64_t number) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(field->choices); i++) {
        PyObject *pair = PyTuple_GET_ITEM(field->choices, i);
        uint64_t known;
        if (as_uint(PyTuple_GET_ITEM(pair, 0), &known) && known == number)
            return Py_NewRef(PyTuple_GET_ITEM(pair, 1));
    }
    return NULL;
}

static PyObject *number_value(const Field *field, uint64_t number) {
    if (field->kind == CHOICE)
        return choice(field, number);
    return field->minimum <= number && number <= field->maximum ? PyLong_FromUnsignedLongLong(number) : NULL;
}

static PyObject *take_field(Reader *from, const Field *field) {
    uint64_t number;
    switch (field->kind) {
    case UINT:
    case CHOICE: return take_uint(from, &number) ? number_value(field, number) : NULL;
    case BIN:
        if (from->at == from->end || *from->at++ != 0xc4 || !take_number(from, 1, &number) ||
            (uint64_t)(from->end - from->at) < number || number < field->minimum || number > field->maximum)
            return NULL;
        from->at += number;
        return PyBytes_FromStringAndSize((const char *)from->at - number, (Py_ssize_t)number);
    default: return take_records(from, field);
    }
}

/* A record whose attributes are still to be filled, the defaults apart. */
static PyObject *new_record(Table *table) {
    PyObject *record = table->type->tp_alloc(table->type, 0);
    for (Py_ssize_t i = 0; record && i < table->default_count; i++)
        *attribute(record, table->defaults[i].offset) = Py_NewRef(table->defaults[i].value);
    return record;
}

static PyObject *take_record(Reader *from, Table *table) {
    uint64_t count;
    if (!take_array(from, &count) || count != (uint64_t)table->field_count)
        return NULL;
    PyObject *record = new_record(table);
    for (Py_ssize_t i = 0; record && i < table->field_count; i++) {
        PyObject *value = take_field(from, &table->fields[i]);
        if (!value)
            Py_CLEAR(record);
        else
            *attribute(record, table->fields[i].offset) = value;
    }
    return record;
}

/* What a function gives for NULL: None, unless memory ran out. */
static PyObject *or_none(PyObject *found) {
    if (found || PyErr_Occurred())
        return found;
    Py_RETURN_NONE;
}

/* Table.holds(record): whether every field is valid. */
static PyObject *table_holds(Table *table, PyObject *record) {
    Writer nothing = {NULL, NULL};
    return PyBool_FromLong(put_record(&nothing, table, record));
}

/* Table.twin(record): an equal record, with the attributes that do not travel at their defaults. */
static PyObject *table_twin(Table *table, PyObject *record) {
    if (Py_TYPE(record) != table->type)
        return PyErr_Format(PyExc_TypeError, "not the table's record");
    PyObject *twin = new_record(table);
    for (Py_ssize_t i = 0; twin && i < table->field_count; i++) {
        PyObject *value = *attribute(record, table->fields[i].offset);
        *attribute(twin, table->fields[i].offset) = Py_XNewRef(value);
    }
    return twin;
}

/* Whether the record describes so many bodies of so many bytes, padding included. */
static int describes(Table *table, PyObject *record, uint64_t body_count, uint64_t body_bytes) {
    if (table->bodies < 0)
        return !body_count && !body_bytes;
    const Field *field = &table->fields[table->bodies];
    PyObject *bodies = *attribute(record, field->offset);
    uint64_t total = 0, length;
    if (field->kind != RECORDS || field->item->length < 0 || (uint64_t)PyTuple_GET_SIZE(bodies) != body_count)
        return 0;
    for (uint64_t i = 0; i < body_count; i++) {
        if (!as_uint(*attribute(PyTuple_GET_ITEM(bodies, i), field->item->length), &length))
            return 0;
        total += (uint64_t)aligned((Py_ssize_t)length);
    }
    return total == body_bytes;
}

/* Table.read(frame, control_bytes, control_crc, body_count, body_bytes[, absent_bytes]), the numbers from the frame's
 * prefix: the record in its control, when the frame's length, without its last absent bytes, the control's crc and padding
 * and the descriptors fit. */
static PyObject *table_read(Table *table, PyObject *const *arguments, Py_ssize_t count) {
    Py_buffer frame;
    uint64_t control_bytes, control_crc, body_count, body_bytes, absent_bytes = 0;
    if ((count != 5 && count != 6) || !as_uint(arguments[1], &control_bytes) || !as_uint(arguments[2], &control_crc) ||
        !as_uint(arguments[3], &body_count) || !as_uint(arguments[4], &body_bytes) || control_bytes > CONTROL_BYTES_MAX ||
        (count == 6 && !as_uint(arguments[5], &absent_bytes)) || absent_bytes > body_bytes)
        Py_RETURN_NONE;
    if (PyObject_GetBuffer(arguments[0], &frame, PyBUF_SIMPLE) < 0)
        return NULL;
    PyObject *record = NULL;
    Py_ssize_t end = PREFIX_BYTES + (Py_ssize_t)control_bytes;
    if (frame.len >= aligned(end) && (uint64_t)(frame.len - aligned(end)) == body_bytes - absent_bytes) {
        const uint8_t *control = (const uint8_t *)frame.buf + PREFIX_BYTES;
        Reader from = {control, control + control_bytes};
        if (crc32c(0, control, (Py_ssize_t)control_bytes) == control_crc && all_zero(from.end, aligned(end) - end))
            record = take_record(&from, table);
        if (record && (from.at != from.end || !describes(table, record, body_count, body_bytes)))
            Py_CLEAR(record);
    }
    PyBuffer_Release(&frame);
    return or_none(record);
}

/* The end of a prefix: key and both crcs. Control is in place. */
static void write_key(uint8_t *to, uint64_t slot, uint64_t generation, uint64_t round, Py_ssize_t control_bytes) {
    store(to + 24, generation, 8);
    store(to + 32, slot, 4);
    store(to + 36, round, 4);
    store(to + 40, crc32c(0, to + PREFIX_BYTES, control_bytes), 4);
    store(to + 44, crc32c(0, to, PREFIX_BYTES - 4), 4);
}

static void write_prefix(uint8_t *to, const uint64_t *key, uint64_t kind, Py_ssize_t control_bytes,
                         Py_ssize_t body_count, Py_ssize_t body_bytes) {
    memcpy(to, "DSPK", 4);
    to[4] = MAJOR, to[5] = MINOR, to[6] = (uint8_t)kind, to[7] = 0;
    store(to + 8, control_bytes, 4);
    store(to + 12, body_count, 2);
    store(to + 14, 0, 2);
    store(to + 16, body_bytes, 8);
    write_key(to, key[0], key[1], key[2], control_bytes);
}

/* Copy a body and give its descriptor the checksum of what was copied. */
static int copy_and_describe(Table *table, PyObject *descriptor, uint8_t *to, const uint8_t *from, Py_ssize_t length) {
    Sum sum;
    uint64_t kind;
    uint8_t found[CHECKSUM_BYTES];
    if (Py_TYPE(descriptor) != table->type || table->sum_kind < 0 || table->sum < 0 ||
        !as_uint(*attribute(descriptor, table->sum_kind), &kind) || !sum_begin(&sum, kind))
        return 0;
    copy_and_sum(&sum, to, from, length);
    sum_end(&sum, found);
    PyObject *checksum = PyBytes_FromStringAndSize((const char *)found, CHECKSUM_BYTES);
    if (checksum)
        Py_SETREF(*attribute(descriptor, table->sum), checksum);
    return checksum != NULL;
}

/* Copy the bodies, which are of contiguous buffers, behind each other with padding; the end, or -1. ``descriptors``, of the
 * table ``described``, get the bodies' checksums; NULL where they have them. */
static Py_ssize_t write_bodies(uint8_t *to, Py_ssize_t at, Py_ssize_t room, PyObject *bodies, Table *described,
                               PyObject *descriptors) {
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(bodies); i++) {
        Py_buffer body;
        if (PyObject_GetBuffer(PySequence_Fast_GET_ITEM(bodies, i), &body, PyBUF_SIMPLE) < 0)
            return -1;
        Py_ssize_t length = body.len, end = at + aligned(length);
        int fits = end <= room;
        if (fits && descriptors)
            fits = copy_and_describe(described, PyTuple_GET_ITEM(descriptors, i), to + at, body.buf, length);
        else if (fits)
            copy(to + at, body.buf, length);
        if (fits)
            memset(to + at + length, 0, aligned(length) - length);
        PyBuffer_Release(&body);
        if (!fits)
            return -1;
        at = end;
    }
    return at;
}

/* The descriptors of a record, or of a tuple of its values, that fit so many bodies; NULL when they do not. */
static PyObject *descriptors_of(Table *table, PyObject *record, Py_ssize_t body_count) {
    if (table->bodies < 0)
        return NULL;
    PyObject *found = PyTuple_CheckExact(record) ? PyTuple_GET_ITEM(record, table->bodies)
                                                 : *attribute(record, table->fields[table->bodies].offset);
    return PyTuple_GET_SIZE(found) == body_count ? found : NULL;
}

static int put(Writer *to, Table *table, PyObject *record) {
    return (PyTuple_CheckExact(record) ? put_values : put_record)(to, table, record);
}

/* Table.write(out, record, type, slot, generation, round, bodies[, summing]): the frame's length, 0 when it was not written
 * (then ``out`` may hold parts of it). ``record`` may be the tuple of its values; ``bodies`` is a list or tuple that fits
 * the record's descriptors. With ``summing`` these get the checksums of the bodies, which are computed while copying. */
static PyObject *table_write(Table *table, PyObject *const *arguments, Py_ssize_t count) {
    uint8_t control[CONTROL_BYTES_MAX];
    uint64_t kind, key[3];
    int summing = count == 8 && arguments[7] == Py_True;
    if (count < 7 || count > 8 || !as_uint(arguments[2], &kind) || !as_uint(arguments[3], &key[0]) ||
        !as_uint(arguments[4], &key[1]) || !as_uint(arguments[5], &key[2]) || kind > UINT8_MAX ||
        key[0] > UINT32_MAX || key[2] > UINT32_MAX || !(PyList_Check(arguments[6]) || PyTuple_Check(arguments[6])))
        return PyLong_FromLong(0);
    Writer to = {control, control + sizeof control};
    PyObject *record = arguments[1], *descriptors = NULL;
    if (!put(&to, table, record))
        return PyLong_FromLong(0);
    if (summing && !(descriptors = descriptors_of(table, record, PySequence_Fast_GET_SIZE(arguments[6]))))
        return PyLong_FromLong(0);
    Py_buffer out;
    if (PyObject_GetBuffer(arguments[0], &out, PyBUF_WRITABLE) < 0)
        return NULL;
    Py_ssize_t control_bytes = to.at - control, head = aligned(PREFIX_BYTES + control_bytes), end = -1;
    uint8_t *frame = out.buf;
    if (head <= out.len)
        end = write_bodies(frame, head, out.len, arguments[6], summing ? table->fields[table->bodies].item : NULL,
                           descriptors);
    if (end >= 0 && summing) { /* again, with the checksums: the size of a control never depends on them */
        to.at = control;
        put(&to, table, record);
    }
    if (end >= 0) {
        memcpy(frame + PREFIX_BYTES, control, control_bytes);
        memset(frame + PREFIX_BYTES + control_bytes, 0, head - PREFIX_BYTES - control_bytes);
        write_prefix(frame, key, kind, control_bytes, PySequence_Fast_GET_SIZE(arguments[6]), end - head);
    }
    PyBuffer_Release(&out);
    if (PyErr_Occurred())
        return NULL;
    return PyLong_FromSsize_t(end < 0 ? 0 : end);
}

/* Whether these are the bytes of a prefix without a fault, and its numbers, in the order of Prefix's fields. */
static int sound_prefix(const uint8_t *at, Py_ssize_t count, uint64_t numbers[8]) {
    if (count < PREFIX_BYTES || memcmp(at, "DSPK", 4) || at[4] != MAJOR || at[7] || at[14] || at[15] ||
        crc32c(0, at, PREFIX_BYTES - 4) != load32(at + 44))
        return 0;
    uint64_t bodies = at[12] | (uint64_t)at[13] << 8, body_bytes = load64(at + 16);
    uint64_t found[8] = {at[6],          load32(at + 8),  bodies,          body_bytes,
                         load64(at + 24), load32(at + 32), load32(at + 36), load32(at + 40)};
    memcpy(numbers, found, sizeof found);
    return body_bytes % ALIGNMENT == 0 && !body_bytes == !bodies;
}

static int in_field(const Field *field, uint64_t number) {
    if (field->kind != CHOICE)
        return field->minimum <= number && number <= field->maximum;
    PyObject *found = choice(field, number);
    Py_XDECREF(found);
    return found != NULL;
}

/* Table.frame_bytes(buffer, start, end): length of the frame that begins at ``start``, from its prefix; 0 when that has a
 * fault or is not all there before ``end``. Of the table of Prefix. */
static PyObject *table_frame_bytes(Table *table, PyObject *const *arguments, Py_ssize_t count) {
    Py_buffer buffer;
    uint64_t start, end, numbers[8];
    if (count != 3 || table->field_count != 8 || !as_uint(arguments[1], &start) || !as_uint(arguments[2], &end))
        return PyLong_FromLong(0);
    if (PyObject_GetBuffer(arguments[0], &buffer, PyBUF_SIMPLE) < 0)
        return NULL;
    int sound = start <= end && end <= (uint64_t)buffer.len &&
                sound_prefix((const uint8_t *)buffer.buf + start, (Py_ssize_t)(end - start), numbers);
    PyBuffer_Release(&buffer);
    for (int i = 0; sound && i < 8; i++)
        sound = in_field(&table->fields[i], numbers[i]);
    if (!sound)
        return PyLong_FromLong(0);
    return PyLong_FromUnsignedLongLong((uint64_t)aligned(PREFIX_BYTES + (Py_ssize_t)numbers[1]) + numbers[3]);
}

/* Table.read_prefix(frame): of the table of Prefix, whose fields are in the order of ``numbers``. */
static PyObject *table_read_prefix(Table *table, PyObject *frame) {
    Py_buffer buffer;
    if (PyObject_GetBuffer(frame, &buffer, PyBUF_SIMPLE) < 0)
        return NULL;
    PyObject *prefix = NULL;
    uint64_t numbers[8];
    if (table->field_count == 8 && sound_prefix(buffer.buf, buffer.len, numbers)) {
        prefix = new_record(table);
        for (int i = 0; prefix && i < 8; i++) {
            PyObject *value = number_value(&table->fields[i], numbers[i]);
            if (!value)
                Py_CLEAR(prefix);
            else
                *attribute(prefix, table->fields[i].offset) = value;
        }
    }
    PyBuffer_Release(&buffer);
    return or_none(prefix);
}

/* Bodies that arrived. */

/* What a descriptor says, whose fields are valid. */
typedef struct {
    uint64_t length, kind;
    const uint8_t *sum;
} Described;

static int described(Table *table, PyObject *record, Described *found) {
    if (table->length < 0 || table->sum_kind < 0 || table->sum < 0 || Py_TYPE(record) != table->type)
        return 0;
    PyObject *sum = *attribute(record, table->sum);
    if (!as_uint(*attribute(record, table->length), &found->length) ||
        !as_uint(*attribute(record, table->sum_kind), &found->kind) || !PyBytes_CheckExact(sum) ||
        PyBytes_GET_SIZE(sum) != CHECKSUM_BYTES)
        return 0;
    found->sum = (const uint8_t *)PyBytes_AS_STRING(sum);
    return found->length <= PY_SSIZE_T_MAX - ALIGNMENT;
}

/* Whether a body has zeros behind it and the checksum that it should; it is copied to ``to`` where that is not NULL. */
static int sound_body(const Described *body, const uint8_t *at, Py_ssize_t padded, uint8_t *to) {
    Sum sum;
    uint8_t found[CHECKSUM_BYTES];
    Py_ssize_t length = (Py_ssize_t)body->length;
    if (padded != aligned(length) || !all_zero(at + length, padded - length) || !sum_begin(&sum, body->kind))
        return 0;
    if (to)
        copy_and_sum(&sum, to, at, length);
    else
        sum_update(&sum, at, length);
    sum_end(&sum, found);
    return !memcmp(found, body->sum, CHECKSUM_BYTES);
}

/* Table.is_sound(descriptor, padded): whether the padded body is what the descriptor says; of the table of descriptors. */
static PyObject *table_is_sound(Table *table, PyObject *const *arguments, Py_ssize_t count) {
    Described body;
    Py_buffer padded;
    if (count != 2 || !described(table, arguments[0], &body))
        Py_RETURN_FALSE;
    if (PyObject_GetBuffer(arguments[1], &padded, PyBUF_SIMPLE) < 0)
        return NULL;
    int sound = sound_body(&body, padded.buf, padded.len, NULL);
    PyBuffer_Release(&padded);
    return PyBool_FromLong(sound);
}

/* The spans of ``out`` that bodies go to: ((start, bytes), ...). */
static int take_span(PyObject *spans, Py_ssize_t index, uint64_t *start, uint64_t *length) {
    PyObject *span = PyTuple_GET_ITEM(spans, index);
    return PyTuple_CheckExact(span) && PyTuple_GET_SIZE(span) == 2 && as_uint(PyTuple_GET_ITEM(span, 0), start) &&
           as_uint(PyTuple_GET_ITEM(span, 1), length);
}

static int stage_bodies(Table *table, const Py_buffer *frame, PyObject *bodies, const Py_buffer *out, PyObject *spans) {
    Described body;
    uint64_t start, length, total = 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(bodies); i++) {
        if (!described(table, PyTuple_GET_ITEM(bodies, i), &body) || !take_span(spans, i, &start, &length) ||
            length != body.length || start > (uint64_t)out->len || length > (uint64_t)out->len - start)
            return 0;
        total += (uint64_t)aligned((Py_ssize_t)length);
        if (total > (uint64_t)frame->len)
            return 0;
    }
    const uint8_t *at = (const uint8_t *)frame->buf + frame->len - total;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(bodies); i++) {
        described(table, PyTuple_GET_ITEM(bodies, i), &body);
        take_span(spans, i, &start, &length);
        Py_ssize_t padded = aligned((Py_ssize_t)length);
        if (!sound_body(&body, at, padded, (uint8_t *)out->buf + start))
            return 0;
        at += padded;
    }
    return 1;
}

/* Table.stage(frame, descriptors, out, spans): whether the bodies, which end the frame, are what the descriptors say, and
 * are now at the spans of ``out``. When not, the spans may have been written to. Of the table of descriptors. */
static PyObject *table_stage(Table *table, PyObject *const *arguments, Py_ssize_t count) {
    Py_buffer frame, out;
    if (count != 4 || !PyTuple_CheckExact(arguments[1]) || !PyTuple_CheckExact(arguments[3]) ||
        PyTuple_GET_SIZE(arguments[1]) != PyTuple_GET_SIZE(arguments[3]))
        Py_RETURN_FALSE;
    if (PyObject_GetBuffer(arguments[0], &frame, PyBUF_SIMPLE) < 0)
        return NULL;
    if (PyObject_GetBuffer(arguments[2], &out, PyBUF_WRITABLE) < 0) {
        PyBuffer_Release(&frame);
        return NULL;
    }
    int staged = stage_bodies(table, &frame, arguments[1], &out, arguments[3]);
    PyBuffer_Release(&frame);
    PyBuffer_Release(&out);
    return PyBool_FromLong(staged);
}

/* Of a body that is expected: its bytes, where in the control its checksum is, where in the block it goes. */
typedef struct {
    uint64_t length, sum, start;
} Expected;

static int take_expected(PyObject *places, Expected *found, Py_ssize_t count, uint64_t control_bytes, uint64_t room) {
    for (Py_ssize_t i = 0; i < count; i++) {
        if (!as_uint(PyTuple_GET_ITEM(places, 1 + 3 * i), &found[i].length) ||
            !as_uint(PyTuple_GET_ITEM(places, 2 + 3 * i), &found[i].sum) ||
            !as_uint(PyTuple_GET_ITEM(places, 3 + 3 * i), &found[i].start))
            return 0;
        if (found[i].sum > control_bytes || control_bytes - found[i].sum < CHECKSUM_BYTES ||
            found[i].start > room || found[i].length > room - found[i].start)
            return 0;
    }
    return 1;
}

/* Whether a control is the expected one but for its bodies' checksums, whose places are in order. */
static int is_expected(const uint8_t *control, const uint8_t *expected, uint64_t control_bytes, const Expected *bodies,
                       Py_ssize_t count) {
    uint64_t at = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (bodies[i].sum < at || memcmp(control + at, expected + at, bodies[i].sum - at))
            return 0;
        at = bodies[i].sum + CHECKSUM_BYTES;
    }
    return !memcmp(control + at, expected + at, control_bytes - at);
}

static int stage_expected(const Py_buffer *frame, const Py_buffer *control, const Py_buffer *out, uint64_t kind,
                          const Expected *bodies, Py_ssize_t count) {
    const uint8_t *prefix = frame->buf, *found = prefix + PREFIX_BYTES;
    Py_ssize_t end = PREFIX_BYTES + control->len, at = aligned(end), total = at;
    for (Py_ssize_t i = 0; i < count; i++)
        total += aligned((Py_ssize_t)bodies[i].length);
    if (frame->len != total || load32(prefix + 8) != (uint32_t)control->len || prefix[12] != count || prefix[13] ||
        load64(prefix + 16) != (uint64_t)(total - at) ||
        load32(prefix + 40) != crc32c(0, found, control->len) || !all_zero(prefix + end, at - end) ||
        !is_expected(found, control->buf, (uint64_t)control->len, bodies, count))
        return 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        Described body = {bodies[i].length, kind, found + bodies[i].sum};
        Py_ssize_t padded = aligned((Py_ssize_t)bodies[i].length);
        if (!sound_body(&body, prefix + at, padded, (uint8_t *)out->buf + bodies[i].start))
            return 0;
        at += padded;
    }
    return 1;
}

/* stage_expected(frame, control, places, out): whether the frame, whose prefix is sound, has this control but for the
 * checksums of its bodies, and these are sound and now in ``out``. ``places``: the kind of the checksums, and for each body
 * its bytes, where in the control its checksum is, and where in ``out`` it goes. When not, ``out`` may have been written
 * to. */
static PyObject *stage_expected_frame(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t count) {
    Expected bodies[3];
    uint64_t kind;
    if (count != 4 || !PyTuple_CheckExact(arguments[2]))
        Py_RETURN_FALSE;
    Py_ssize_t body_count = PyTuple_GET_SIZE(arguments[2]) / 3;
    if (!body_count || body_count > 3 || PyTuple_GET_SIZE(arguments[2]) != 1 + 3 * body_count ||
        !as_uint(PyTuple_GET_ITEM(arguments[2], 0), &kind))
        Py_RETURN_FALSE;
    Py_buffer buffers[3];
    PyObject *const objects[] = {arguments[0], arguments[1], arguments[3]};
    for (int i = 0; i < 3; i++)
        if (PyObject_GetBuffer(objects[i], &buffers[i], i == 2 ? PyBUF_WRITABLE : PyBUF_SIMPLE) < 0) {
            while (i-- > 0)
                PyBuffer_Release(&buffers[i]);
            return NULL;
        }
    int staged = buffers[0].len >= PREFIX_BYTES && buffers[1].len <= CONTROL_BYTES_MAX &&
                 take_expected(arguments[2], bodies, body_count, (uint64_t)buffers[1].len, (uint64_t)buffers[2].len) &&
                 stage_expected(&buffers[0], &buffers[1], &buffers[2], kind, bodies, body_count);
    for (int i = 0; i < 3; i++)
        PyBuffer_Release(&buffers[i]);
    return PyBool_FromLong(staged);
}

/* checksum(kind, pieces): of bytes that lie in several places, a list or tuple of buffers; None for an unknown kind. */
static PyObject *checksum(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t count) {
    Sum sum;
    uint64_t kind;
    uint8_t found[CHECKSUM_BYTES];
    if (count != 2 || !as_uint(arguments[0], &kind) || !sum_begin(&sum, kind) ||
        !(PyList_Check(arguments[1]) || PyTuple_Check(arguments[1])))
        Py_RETURN_NONE;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(arguments[1]); i++) {
        Py_buffer piece;
        if (PyObject_GetBuffer(PySequence_Fast_GET_ITEM(arguments[1], i), &piece, PyBUF_SIMPLE) < 0)
            return NULL;
        sum_update(&sum, piece.buf, piece.len);
        PyBuffer_Release(&piece);
    }
    sum_end(&sum, found);
    return PyBytes_FromStringAndSize((const char *)found, CHECKSUM_BYTES);
}

/* address(buffer): where its memory begins. */
static PyObject *address(PyObject *Py_UNUSED(module), PyObject *object) {
    Py_buffer buffer;
    if (PyObject_GetBuffer(object, &buffer, PyBUF_SIMPLE) < 0)
        return NULL;
    PyObject *found = PyLong_FromVoidPtr(buffer.buf);
    PyBuffer_Release(&buffer);
    return found;
}

/* Rows. */

typedef struct {
    uint64_t rows, ids_row, q_row, least, width, vocabulary;
} Shape;

/* The shape that a ReplyLayout keeps: (depth, bytes of a row's ids, of its q, least entries, most). */
static int take_shape(PyObject *values, Shape *shape) {
    uint64_t *numbers[] = {&shape->rows, &shape->ids_row, &shape->q_row, &shape->least, &shape->width};
    if (!PyTuple_CheckExact(values) || PyTuple_GET_SIZE(values) != 5)
        return 0;
    for (int i = 0; i < 5; i++)
        if (!as_uint(PyTuple_GET_ITEM(values, i), numbers[i]) || *numbers[i] > VOCAB_MAX)
            return 0;
    shape->vocabulary = VOCAB_MAX + 1ull;
    return shape->rows <= ROWS_MAX;
}

/* The crc of a row as far as its q. */
static uint32_t head_crc(const uint8_t *record, const uint8_t *ids, const Shape *shape) {
    uint8_t covered[12];
    memcpy(covered, record, 8);
    memcpy(covered + 8, record + 12, 4);
    return crc32c(crc32c(0, covered, 12), ids, (Py_ssize_t)shape->ids_row);
}

static int in_range(const Shape *shape, uint64_t token, uint64_t entries, uint64_t confidence) {
    return token < shape->vocabulary && shape->least <= entries && entries <= shape->width &&
           confidence <= CONFIDENCE_MAX;
}

/* Where the q of a reply begins in its block. */
static Py_ssize_t q_offset(const Shape *shape) { return (Py_ssize_t)(shape->rows * (RECORD_BYTES + shape->ids_row)); }

/* Whether these rows of a block are sound and, where ``expected`` is not NULL, the sum has that value after their q. */
static int sound_rows(const uint8_t *block, const Shape *shape, uint64_t first, uint64_t rows, Sum *sum,
                      const uint8_t *expected) {
    const uint8_t *ids = block + shape->rows * RECORD_BYTES, *q = block + q_offset(shape) + first * shape->q_row;
    uint8_t found[CHECKSUM_BYTES];
    for (uint64_t row = first; row < first + rows; row++) {
        const uint8_t *record = block + row * RECORD_BYTES;
        uint32_t crc = head_crc(record, ids + row * shape->ids_row, shape);
        for (uint64_t at = 0; at < shape->q_row; at += PIECE) {
            Py_ssize_t now = (Py_ssize_t)(shape->q_row - at < PIECE ? shape->q_row - at : PIECE);
            crc = crc32c(crc, q + at, now);
            if (expected)
                sum_update(sum, q + at, now);
        }
        q += shape->q_row;
        if (crc != load32(record + 8) || !in_range(shape, load32(record), load32(record + 4), load32(record + 12)))
            return 0;
    }
    if (!expected)
        return 1;
    sum_end(sum, found);
    return !memcmp(found, expected, CHECKSUM_BYTES);
}

static PyObject *column(const uint8_t *block, uint64_t depth, int offset) {
    PyObject *values = PyTuple_New((Py_ssize_t)depth);
    for (uint64_t row = 0; values && row < depth; row++) {
        PyObject *value = PyLong_FromUnsignedLong(load32(block + row * RECORD_BYTES + offset));
        if (!value)
            Py_CLEAR(values);
        else
            PyTuple_SET_ITEM(values, row, value);
    }
    return values;
}

/* check_rows(block, shape, vocabulary[, kind, checksum]): (tokens, entries, confidences) of a reply's block whose every row
 * is sound and which has this checksum, where one is given; or None. */
static PyObject *check_rows(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t count) {
    Py_buffer block;
    Shape shape;
    Sum sum;
    uint64_t kind;
    if ((count != 3 && count != 5) || !take_shape(arguments[1], &shape) || !as_uint(arguments[2], &shape.vocabulary) ||
        shape.vocabulary > VOCAB_MAX + 1ull)
        Py_RETURN_NONE;
    if (count == 5 && (!as_uint(arguments[3], &kind) || !sum_begin(&sum, kind) || !PyBytes_CheckExact(arguments[4]) ||
                       PyBytes_GET_SIZE(arguments[4]) != CHECKSUM_BYTES))
        Py_RETURN_NONE;
    const uint8_t *expected = count == 5 ? (const uint8_t *)PyBytes_AS_STRING(arguments[4]) : NULL;
    if (PyObject_GetBuffer(arguments[0], &block, PyBUF_SIMPLE) < 0)
        return NULL;
    PyObject *columns = NULL;
    int fits = (uint64_t)block.len == shape.rows * (RECORD_BYTES + shape.ids_row + shape.q_row);
    if (fits && expected)
        sum_update(&sum, block.buf, q_offset(&shape));
    if (fits && sound_rows(block.buf, &shape, 0, shape.rows, &sum, expected))
        columns = Py_BuildValue("NNN", column(block.buf, shape.rows, 0), column(block.buf, shape.rows, 4),
                                column(block.buf, shape.rows, 12));
    PyBuffer_Release(&block);
    return or_none(columns);
}

static int take_column(PyObject *values, uint64_t depth, uint64_t *numbers) {
    if (!(PyList_CheckExact(values) || PyTuple_CheckExact(values)) ||
        (uint64_t)PySequence_Fast_GET_SIZE(values) != depth)
        return 0;
    for (uint64_t i = 0; i < depth; i++) {
        PyObject *value = PySequence_Fast_GET_ITEM(values, i);
        if (!PyLong_CheckExact(value) || !as_uint(value, &numbers[i]))
            return 0;
    }
    return 1;
}

/* write_records(records, ids, q, shape, rows, tokens, entries, confidences): whether the records of ``rows`` rows, whose
 * ids and q are given, were written. Nothing is written unless all is in range. */
static PyObject *write_records(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t count) {
    Shape shape;
    uint64_t columns[3][ROWS_MAX];
    if (count != 8 || !take_shape(arguments[3], &shape) || !as_uint(arguments[4], &shape.rows) || shape.rows > ROWS_MAX)
        Py_RETURN_FALSE;
    for (int i = 0; i < 3; i++)
        if (!take_column(arguments[5 + i], shape.rows, columns[i]))
            Py_RETURN_FALSE;
    for (uint64_t row = 0; row < shape.rows; row++)
        if (!in_range(&shape, columns[0][row], columns[1][row], columns[2][row]))
            Py_RETURN_FALSE;
    Py_buffer buffers[3];
    for (int i = 0; i < 3; i++)
        if (PyObject_GetBuffer(arguments[i], &buffers[i], i ? PyBUF_SIMPLE : PyBUF_WRITABLE) < 0) {
            while (i-- > 0)
                PyBuffer_Release(&buffers[i]);
            return NULL;
        }
    int fits = (uint64_t)buffers[0].len == shape.rows * RECORD_BYTES &&
               (uint64_t)buffers[1].len == shape.rows * shape.ids_row &&
               (uint64_t)buffers[2].len == shape.rows * shape.q_row;
    for (uint64_t row = 0; fits && row < shape.rows; row++) {
        uint8_t *record = (uint8_t *)buffers[0].buf + row * RECORD_BYTES;
        const uint8_t *ids = (const uint8_t *)buffers[1].buf + row * shape.ids_row;
        store(record, columns[0][row], 4);
        store(record + 4, columns[1][row], 4);
        store(record + 12, columns[2][row], 4);
        uint32_t crc = head_crc(record, ids, &shape);
        crc = crc32c(crc, (const uint8_t *)buffers[2].buf + row * shape.q_row, (Py_ssize_t)shape.q_row);
        store(record + 8, crc, 4);
    }
    for (int i = 0; i < 3; i++)
        PyBuffer_Release(&buffers[i]);
    return PyBool_FromLong(fits);
}

/* A ROW frame to be filled: bytes of its control, first row, rows, and of each body where it begins and where its
 * checksum is. Bodies are records, ids where the shape has them, and q where it has that. */
typedef struct {
    uint64_t control_bytes, first, rows, kind, bodies, body[3], sum[3];
} Blank;

static int take_blank(PyObject *values, Blank *blank) {
    uint64_t *numbers[] = {&blank->control_bytes, &blank->first,  &blank->rows,   &blank->kind,    &blank->bodies, &blank->body[0],
                           &blank->sum[0],        &blank->body[1], &blank->sum[1], &blank->body[2], &blank->sum[2]};
    if (!PyTuple_CheckExact(values) || PyTuple_GET_SIZE(values) < 7 || PyTuple_GET_SIZE(values) > 11)
        return 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(values); i++)
        if (!as_uint(PyTuple_GET_ITEM(values, i), numbers[i]) || *numbers[i] > VOCAB_MAX)
            return 0;
    return blank->bodies && blank->bodies <= 3 && (uint64_t)PyTuple_GET_SIZE(values) == 5 + 2 * blank->bodies &&
           blank->rows && blank->control_bytes <= CONTROL_BYTES_MAX;
}

/* Bytes of a body of the blank's rows. */
static uint64_t body_bytes_of(const Blank *blank, const Shape *shape, uint64_t body) {
    uint64_t row = body == 0 ? RECORD_BYTES : body == 1 && shape->ids_row ? shape->ids_row : shape->q_row;
    return blank->rows * row;
}

static int fits_frame(const Blank *blank, const Shape *shape, Py_ssize_t frame_bytes) {
    if (blank->bodies != 1u + !!shape->ids_row + !!shape->q_row || blank->first + blank->rows > shape->rows)
        return 0;
    uint64_t end = (uint64_t)aligned(PREFIX_BYTES + (Py_ssize_t)blank->control_bytes);
    for (uint64_t i = 0; i < blank->bodies; i++) {
        if (blank->body[i] != end || blank->sum[i] + CHECKSUM_BYTES > PREFIX_BYTES + blank->control_bytes)
            return 0;
        end += (uint64_t)aligned((Py_ssize_t)body_bytes_of(blank, shape, i));
    }
    return end == (uint64_t)frame_bytes;
}

/* Copy the rows' ids and q into the frame, write records and checksums, each value in one pass. */
static void fill_rows_of(uint8_t *frame, const Blank *blank, const Shape *shape, const uint8_t *ids, const uint8_t *q,
                         uint64_t columns[3][ROWS_MAX]) {
    Sum sums[3];
    uint64_t ids_body = 1, q_body = blank->bodies - 1;
    uint8_t *records = frame + blank->body[0];
    for (uint64_t i = 0; i < blank->bodies; i++)
        sum_begin(&sums[i], blank->kind);
    for (uint64_t row = 0; row < blank->rows; row++) {
        uint8_t *record = records + row * RECORD_BYTES, *to;
        uint64_t source = blank->first + row;
        store(record, columns[0][source], 4);
        store(record + 4, columns[1][source], 4);
        store(record + 12, columns[2][source], 4);
        uint32_t crc = head_crc(record, ids + source * shape->ids_row, shape);
        if (shape->ids_row)
            copy_and_sum(&sums[ids_body], frame + blank->body[ids_body] + row * shape->ids_row,
                         ids + source * shape->ids_row, (Py_ssize_t)shape->ids_row);
        to = shape->q_row ? frame + blank->body[q_body] + row * shape->q_row : frame;
        for (uint64_t at = 0; at < shape->q_row; at += PIECE) {
            Py_ssize_t now = (Py_ssize_t)(shape->q_row - at < PIECE ? shape->q_row - at : PIECE);
            copy_and_sum(&sums[q_body], to + at, q + source * shape->q_row + at, now);
            crc = crc32c(crc, to + at, now);
        }
        store(record + 8, crc, 4);
    }
    sum_update(&sums[0], records, (Py_ssize_t)(blank->rows * RECORD_BYTES));
    for (uint64_t i = 0; i < blank->bodies; i++)
        sum_end(&sums[i], frame + blank->sum[i]);
}

static int take_columns(PyObject *values, const Shape *shape, uint64_t columns[3][ROWS_MAX]) {
    if (!PyTuple_CheckExact(values) || PyTuple_GET_SIZE(values) != 3)
        return 0;
    for (int i = 0; i < 3; i++)
        if (!take_column(PyTuple_GET_ITEM(values, i), shape->rows, columns[i]))
            return 0;
    for (uint64_t row = 0; row < shape->rows; row++)
        if (!in_range(shape, columns[0][row], columns[1][row], columns[2][row]))
            return 0;
    return 1;
}

/* The arguments of fill_rows, whose tokens must be of this vocabulary: 1 when the blank's part of a reply is in its frame,
 * -1 with an exception. ``sum``, where it is not NULL, gets the reply's checksum; the frame must then hold all its rows. */
static int fill(PyObject *const *arguments, uint64_t vocabulary, uint8_t *sum) {
    Blank blank;
    Shape shape;
    Sum whole;
    uint64_t columns[3][ROWS_MAX], key[3];
    if (!take_blank(arguments[1], &blank) || !take_shape(arguments[4], &shape))
        return 0;
    shape.vocabulary = vocabulary;
    if (!take_columns(arguments[5], &shape, columns) || !sum_begin(&whole, blank.kind) ||
        (sum && blank.rows != shape.rows))
        return 0;
    for (int i = 0; i < 3; i++)
        if (!as_uint(arguments[6 + i], &key[i]))
            return 0;
    if (key[0] > UINT32_MAX || key[2] > UINT32_MAX)
        return 0;
    Py_buffer buffers[3];
    PyObject *const objects[] = {arguments[0], arguments[2], arguments[3]};
    for (int i = 0; i < 3; i++)
        if (PyObject_GetBuffer(objects[i], &buffers[i], i ? PyBUF_SIMPLE : PyBUF_WRITABLE) < 0) {
            while (i-- > 0)
                PyBuffer_Release(&buffers[i]);
            return -1;
        }
    uint8_t *frame = buffers[0].buf;
    int fits = fits_frame(&blank, &shape, buffers[0].len) && (uint64_t)buffers[1].len == shape.rows * shape.ids_row &&
               (uint64_t)buffers[2].len == shape.rows * shape.q_row;
    if (fits) {
        fill_rows_of(frame, &blank, &shape, buffers[1].buf, buffers[2].buf, columns);
        write_key(frame, key[0], key[1], key[2], (Py_ssize_t)blank.control_bytes);
    }
    if (fits && sum) {
        for (uint64_t i = 0; i < blank.bodies; i++)
            sum_update(&whole, frame + blank.body[i], (Py_ssize_t)body_bytes_of(&blank, &shape, i));
        sum_end(&whole, sum);
    }
    for (int i = 0; i < 3; i++)
        PyBuffer_Release(&buffers[i]);
    return fits;
}

/* fill_rows(frame, blank, ids, q, shape, (tokens, entries, confidences), slot, generation, round): whether the blank's part
 * of a reply, whose ids, q and columns are whole, is now in its frame, under this key. Nothing is written unless all is in
 * range. */
static PyObject *fill_rows(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t count) {
    int filled = count == 9 ? fill(arguments, VOCAB_MAX + 1ull, NULL) : 0;
    return filled < 0 ? NULL : PyBool_FromLong(filled);
}

/* fill_reply(the arguments of fill_rows, vocabulary): the checksum of a reply that is now in its one frame, or None. */
static PyObject *fill_reply(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t count) {
    uint64_t vocabulary;
    uint8_t sum[CHECKSUM_BYTES];
    if (count != 10 || !as_uint(arguments[9], &vocabulary) || vocabulary > VOCAB_MAX + 1ull)
        Py_RETURN_NONE;
    if (fill(arguments, vocabulary, sum) <= 0) {
        PyErr_Clear(); /* ids and q are as the caller gave them: Python says what is wrong with them */
        Py_RETURN_NONE;
    }
    return PyBytes_FromStringAndSize((const char *)sum, CHECKSUM_BYTES);
}

/* prefix_digest(digest, tokens): the digest of a prefix after a list or tuple of tokens more, or None. */
static PyObject *prefix_digest(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t count) {
    uint8_t covered[CHECKSUM_BYTES + 4];
    if (count != 2 || !PyBytes_CheckExact(arguments[0]) || PyBytes_GET_SIZE(arguments[0]) != CHECKSUM_BYTES ||
        !(PyList_CheckExact(arguments[1]) || PyTuple_CheckExact(arguments[1])))
        Py_RETURN_NONE;
    memcpy(covered, PyBytes_AS_STRING(arguments[0]), CHECKSUM_BYTES);
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(arguments[1]); i++) {
        PyObject *value = PySequence_Fast_GET_ITEM(arguments[1], i);
        uint64_t token;
        Sum sum;
        if (!PyLong_CheckExact(value) || !as_uint(value, &token) || token > UINT32_MAX)
            Py_RETURN_NONE;
        store(covered + CHECKSUM_BYTES, token, 4);
        sum_begin(&sum, XXH3_64);
        sum_update(&sum, covered, sizeof covered);
        sum_end(&sum, covered);
    }
    return PyBytes_FromStringAndSize((const char *)covered, CHECKSUM_BYTES);
}

/* check_placed(block, shape, vocabulary, first, rows, kind, checksum): whether the q of these rows of a reply's block has
 * that body checksum, and each of the rows is sound; one pass. */
static PyObject *check_placed(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t count) {
    Py_buffer block;
    Shape shape;
    Sum sum;
    uint64_t first, rows, kind;
    if (count != 7 || !take_shape(arguments[1], &shape) || !as_uint(arguments[2], &shape.vocabulary) ||
        shape.vocabulary > VOCAB_MAX + 1ull || !as_uint(arguments[3], &first) || !as_uint(arguments[4], &rows) ||
        first > shape.rows || rows > shape.rows - first || !as_uint(arguments[5], &kind) || !sum_begin(&sum, kind) ||
        !PyBytes_CheckExact(arguments[6]) || PyBytes_GET_SIZE(arguments[6]) != CHECKSUM_BYTES)
        Py_RETURN_FALSE;
    if (PyObject_GetBuffer(arguments[0], &block, PyBUF_SIMPLE) < 0)
        return NULL;
    int sound = (uint64_t)block.len == shape.rows * (RECORD_BYTES + shape.ids_row + shape.q_row) &&
                sound_rows(block.buf, &shape, first, rows, &sum, (const uint8_t *)PyBytes_AS_STRING(arguments[6]));
    PyBuffer_Release(&block);
    return PyBool_FromLong(sound);
}

/* Records without checks: what a frozen dataclass does with one call of Python for each field, done at once. */

typedef struct {
    PyObject_HEAD
    PyTypeObject *type;
    Py_ssize_t count;
    Py_ssize_t *offsets;
} Maker;

/* Maker(record class, (name, ...)) */
static PyObject *maker_new(PyTypeObject *type, PyObject *arguments, PyObject *Py_UNUSED(keywords)) {
    PyObject *record, *names;
    if (!PyArg_ParseTuple(arguments, "O!O!", &PyType_Type, &record, &PyTuple_Type, &names))
        return NULL;
    Maker *maker = (Maker *)type->tp_alloc(type, 0);
    if (!maker)
        return NULL;
    maker->type = (PyTypeObject *)Py_NewRef(record);
    maker->count = PyTuple_GET_SIZE(names);
    maker->offsets = PyMem_Calloc(maker->count + 1, sizeof(Py_ssize_t));
    for (Py_ssize_t i = 0; maker->offsets && i < maker->count; i++) {
        maker->offsets[i] = attribute_offset(record, PyTuple_GET_ITEM(names, i));
        if (maker->offsets[i] < 0) {
            Py_DECREF(maker);
            return NULL;
        }
    }
    if (!maker->offsets) {
        Py_DECREF(maker);
        return PyErr_NoMemory();
    }
    return (PyObject *)maker;
}

static void maker_dealloc(Maker *maker) {
    PyTypeObject *type = Py_TYPE(maker);
    PyMem_Free(maker->offsets);
    Py_XDECREF(maker->type);
    type->tp_free(maker);
    Py_DECREF(type);
}

/* Maker.make(value, ...): the record with these values, one for each name. */
static PyObject *maker_make(Maker *maker, PyObject *const *arguments, Py_ssize_t count) {
    if (count != maker->count)
        return PyErr_Format(PyExc_TypeError, "%s needs %zd values, not %zd", maker->type->tp_name, maker->count, count);
    PyObject *record = maker->type->tp_alloc(maker->type, 0);
    for (Py_ssize_t i = 0; record && i < count; i++)
        *attribute(record, maker->offsets[i]) = Py_NewRef(arguments[i]);
    return record;
}

static PyMethodDef maker_methods[] = {
    {"make", (PyCFunction)(void (*)(void))maker_make, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot maker_slots[] = {
    {Py_tp_new, maker_new}, {Py_tp_dealloc, maker_dealloc}, {Py_tp_methods, maker_methods}, {0, NULL}};

static PyType_Spec maker_spec = {"dspark_proto._codec.Maker", sizeof(Maker), 0, Py_TPFLAGS_DEFAULT, maker_slots};

static PyMethodDef table_methods[] = {
    {"holds", (PyCFunction)table_holds, METH_O, NULL},
    {"twin", (PyCFunction)table_twin, METH_O, NULL},
    {"read", (PyCFunction)(void (*)(void))table_read, METH_FASTCALL, NULL},
    {"write", (PyCFunction)(void (*)(void))table_write, METH_FASTCALL, NULL},
    {"read_prefix", (PyCFunction)table_read_prefix, METH_O, NULL},
    {"frame_bytes", (PyCFunction)(void (*)(void))table_frame_bytes, METH_FASTCALL, NULL},
    {"is_sound", (PyCFunction)(void (*)(void))table_is_sound, METH_FASTCALL, NULL},
    {"stage", (PyCFunction)(void (*)(void))table_stage, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot table_slots[] = {
    {Py_tp_new, table_new}, {Py_tp_dealloc, table_dealloc}, {Py_tp_methods, table_methods}, {0, NULL}};

static PyType_Spec table_spec = {"dspark_proto._codec.Table", sizeof(Table), 0, Py_TPFLAGS_DEFAULT, table_slots};

/* rewrite_key(frame, control_bytes, slot, generation, round): whether the key and the crcs were written. */
static PyObject *rewrite_key(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t count) {
    Py_buffer frame;
    uint64_t control_bytes, slot, generation, round;
    if (count != 5 || !as_uint(arguments[1], &control_bytes) || !as_uint(arguments[2], &slot) ||
        !as_uint(arguments[3], &generation) || !as_uint(arguments[4], &round) || control_bytes > CONTROL_BYTES_MAX ||
        slot > UINT32_MAX || round > UINT32_MAX)
        Py_RETURN_FALSE;
    if (PyObject_GetBuffer(arguments[0], &frame, PyBUF_WRITABLE) < 0)
        return NULL;
    int fits = frame.len >= PREFIX_BYTES + (Py_ssize_t)control_bytes;
    if (fits)
        write_key(frame.buf, slot, generation, round, (Py_ssize_t)control_bytes);
    PyBuffer_Release(&frame);
    return PyBool_FromLong(fits);
}

static PyMethodDef functions[] = {
    {"rewrite_key", (PyCFunction)(void (*)(void))rewrite_key, METH_FASTCALL, NULL},
    {"check_rows", (PyCFunction)(void (*)(void))check_rows, METH_FASTCALL, NULL},
    {"write_records", (PyCFunction)(void (*)(void))write_records, METH_FASTCALL, NULL},
    {"fill_rows", (PyCFunction)(void (*)(void))fill_rows, METH_FASTCALL, NULL},
    {"stage_expected", (PyCFunction)(void (*)(void))stage_expected_frame, METH_FASTCALL, NULL},
    {"fill_reply", (PyCFunction)(void (*)(void))fill_reply, METH_FASTCALL, NULL},
    {"prefix_digest", (PyCFunction)(void (*)(void))prefix_digest, METH_FASTCALL, NULL},
    {"check_placed", (PyCFunction)(void (*)(void))check_placed, METH_FASTCALL, NULL},
    {"checksum", (PyCFunction)(void (*)(void))checksum, METH_FASTCALL, NULL},
    {"address", (PyCFunction)address, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_codec", NULL, -1, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__codec(void) {
    choose_crc32c();
    xxh3_choose();
    PyObject *module = PyModule_Create(&definition);
    table_type = (PyTypeObject *)PyType_FromSpec(&table_spec);
    PyTypeObject *maker_type = (PyTypeObject *)PyType_FromSpec(&maker_spec);
    if (!module || !table_type || !maker_type || PyModule_AddIntConstant(module, "INTERFACE", INTERFACE) < 0 ||
        PyModule_AddIntConstant(module, "CPU_CRC", crc32c_step != crc32c_by_tables) < 0 ||
        PyModule_AddType(module, table_type) < 0 || PyModule_AddType(module, maker_type) < 0) {
        Py_XDECREF(module);
        return NULL;
    }
    return module;
}
