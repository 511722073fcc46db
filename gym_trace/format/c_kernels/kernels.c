/* Inner loops of gym_trace/format in C: checksums, the transforms of gym_trace/format/transforms.py, and logs of rings.
 *
 * gym_trace/format/kernels.py documents them and their twins in Python. Arguments are buffers, whose sizes are checked
 * here; no other memory is read or written. The interpreter lock is released for large buffers.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "constants.h"

#define LARGE (1 << 15)      /* bytes worth releasing the interpreter lock for */
#define PASS_BYTES (1 << 15) /* bytes of rows per pass, which stay in the cache of a core */

#if defined(__GNUC__) && defined(__x86_64__) && defined(__linux__) && !defined(__clang__)
#define FOR_EACH_CPU __attribute__((target_clones("avx2", "default")))
#else
#define FOR_EACH_CPU
#endif
#if defined(__GNUC__) && defined(__x86_64__)
#define IS_X86 1
#include <immintrin.h>
#endif

/* -- CRC-32 -------------------------------------------------------------------------------------------------------- */

static uint32_t crc_table[8][256];

static void make_crc_table(void)
{
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++) {
            crc = crc >> 1 ^ (crc & 1 ? 0xEDB88320u : 0);
        }
        crc_table[0][byte] = crc;
    }
    for (int slice = 1; slice < 8; slice++) {
        for (int byte = 0; byte < 256; byte++) {
            uint32_t before = crc_table[slice - 1][byte];
            crc_table[slice][byte] = before >> 8 ^ crc_table[0][before & 255];
        }
    }
}

/* crc, here and in crc_by_folding(): the inverted checksum of the bytes before. */
static uint32_t crc_by_table(const uint8_t *data, size_t size, uint32_t crc)
{
    for (; size >= 8; data += 8, size -= 8) {
        uint64_t word;
        memcpy(&word, data, 8);
        word ^= crc;
        crc = 0;
        for (int slice = 0; slice < 8; slice++) {
            crc ^= crc_table[7 - slice][word >> 8 * slice & 255];
        }
    }
    for (; size > 0; data++, size--) {
        crc = crc >> 8 ^ crc_table[0][(crc ^ *data) & 255];
    }
    return crc;
}

#ifdef IS_X86
/* Folding by carry-less multiplication: Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ",
 * Intel 2009. Constants are powers of x modulo the reflected polynomial. size: a multiple of 16, at least 64. */
__attribute__((target("pclmul,sse4.1"))) static uint32_t crc_by_folding(const uint8_t *data, size_t size, uint32_t crc)
{
    const __m128i by_four = _mm_set_epi64x(0x01c6e41596, 0x0154442bd4);
    const __m128i by_one = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0);
    const __m128i to_64 = _mm_set_epi64x(0, 0x0163cd6124);
    const __m128i barrett = _mm_set_epi64x(0x01f7011641, 0x01db710641);
    const __m128i low = _mm_setr_epi32(~0, 0, ~0, 0);
    __m128i part[4];
    for (int i = 0; i < 4; i++) {
        part[i] = _mm_loadu_si128((const __m128i *)data + i);
    }
    part[0] = _mm_xor_si128(part[0], _mm_cvtsi32_si128((int)crc));
    data += 64;
    size -= 64;
    for (; size >= 64; data += 64, size -= 64) {
        for (int i = 0; i < 4; i++) {
            __m128i folded = _mm_clmulepi64_si128(part[i], by_four, 0x00);
            part[i] = _mm_xor_si128(_mm_clmulepi64_si128(part[i], by_four, 0x11), folded);
            part[i] = _mm_xor_si128(part[i], _mm_loadu_si128((const __m128i *)data + i));
        }
    }
    __m128i sum = part[0];
    for (int i = 1; i < 4 || size >= 16; i++) {
        __m128i next = part[i & 3];
        if (i >= 4) {
            next = _mm_loadu_si128((const __m128i *)data);
            data += 16;
            size -= 16;
        }
        __m128i folded = _mm_clmulepi64_si128(sum, by_one, 0x00);
        sum = _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(sum, by_one, 0x11), folded), next);
    }
    sum = _mm_xor_si128(_mm_srli_si128(sum, 8), _mm_clmulepi64_si128(sum, by_one, 0x10));
    __m128i rest = _mm_srli_si128(sum, 4);
    sum = _mm_xor_si128(_mm_clmulepi64_si128(_mm_and_si128(sum, low), to_64, 0x00), rest);
    rest = _mm_clmulepi64_si128(_mm_and_si128(sum, low), barrett, 0x10);
    rest = _mm_clmulepi64_si128(_mm_and_si128(rest, low), barrett, 0x00);
    return (uint32_t)_mm_extract_epi32(_mm_xor_si128(sum, rest), 1);
}
#endif

static int can_fold;

static uint32_t crc_of(const uint8_t *data, size_t size, uint32_t crc)
{
    crc = ~crc;
#ifdef IS_X86
    if (can_fold && size >= 64) {
        size_t folded = size & ~(size_t)15;
        crc = crc_by_folding(data, folded, crc);
        data += folded;
        size -= folded;
    }
#endif
    return ~crc_by_table(data, size, crc);
}

static PyObject *crc32_(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    Py_buffer data;
    unsigned long crc = 0;
    if (count < 1 || count > 2) {
        PyErr_SetString(PyExc_TypeError, "crc32(data, value=0)");
        return NULL;
    }
    if (count == 2) {
        crc = PyLong_AsUnsignedLongMask(args[1]);
        if (PyErr_Occurred()) {
            return NULL;
        }
    }
    if (PyObject_GetBuffer(args[0], &data, PyBUF_SIMPLE) < 0) {
        return NULL;
    }
    uint32_t found;
    if (data.len < LARGE) {
        found = crc_of(data.buf, (size_t)data.len, (uint32_t)crc);
    } else {
        Py_BEGIN_ALLOW_THREADS
        found = crc_of(data.buf, (size_t)data.len, (uint32_t)crc);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&data);
    return PyLong_FromUnsignedLong(found);
}

/* -- bytes grouped by their position in the element ---------------------------------------------------------------- */

/* Writes the elements from begin to end - 1 to out. planes: one per byte of an element, each of `count` bytes. */
FOR_EACH_CPU static void unshuffle(const uint8_t *restrict planes, uint8_t *restrict out, size_t count, size_t begin,
                                   size_t end, size_t width)
{
    const uint8_t *p = planes + begin;
    size_t n = end - begin;
    if (width == 1) {
        memcpy(out, p, n);
    } else if (width == 2) {
        for (size_t i = 0; i < n; i++) {
            uint16_t word = (uint16_t)(p[i] | p[count + i] << 8);
            memcpy(out + 2 * i, &word, 2);
        }
    } else if (width == 4) {
        for (size_t i = 0; i < n; i++) {
            uint32_t word = p[i] | (uint32_t)p[count + i] << 8 | (uint32_t)p[2 * count + i] << 16 |
                            (uint32_t)p[3 * count + i] << 24;
            memcpy(out + 4 * i, &word, 4);
        }
    } else if (width == 8) {
        for (size_t i = 0; i < n; i++) {
            uint64_t word = 0;
            for (size_t j = 0; j < 8; j++) {
                word |= (uint64_t)p[j * count + i] << 8 * j;
            }
            memcpy(out + 8 * i, &word, 8);
        }
    } else {
        for (size_t i = 0; i < n; i += 64) {
            size_t some = n - i < 64 ? n - i : 64;
            for (size_t j = 0; j < width; j++) {
                const uint8_t *source = p + j * count + i;
                uint8_t *target = out + i * width + j;
                for (size_t k = 0; k < some; k++) {
                    target[k * width] = source[k];
                }
            }
        }
    }
}

/* Transpose 8 x 8 bytes: byte j of word i becomes byte i of word j. */
static inline void transpose(uint64_t *word)
{
#ifdef IS_X86
    __m128i pair[4];
    for (int i = 0; i < 4; i++) {
        pair[i] =
            _mm_unpacklo_epi8(_mm_cvtsi64_si128((long long)word[2 * i]), _mm_cvtsi64_si128((long long)word[2 * i + 1]));
    }
    __m128i low[2] = {_mm_unpacklo_epi16(pair[0], pair[1]), _mm_unpacklo_epi16(pair[2], pair[3])};
    __m128i high[2] = {_mm_unpackhi_epi16(pair[0], pair[1]), _mm_unpackhi_epi16(pair[2], pair[3])};
    _mm_storeu_si128((__m128i *)word, _mm_unpacklo_epi32(low[0], low[1]));
    _mm_storeu_si128((__m128i *)(word + 2), _mm_unpackhi_epi32(low[0], low[1]));
    _mm_storeu_si128((__m128i *)(word + 4), _mm_unpacklo_epi32(high[0], high[1]));
    _mm_storeu_si128((__m128i *)(word + 6), _mm_unpackhi_epi32(high[0], high[1]));
#else
    for (int i = 0; i < 4; i++) {
        uint64_t swap = (word[i] >> 32 ^ word[i + 4]) & 0x00000000FFFFFFFFu;
        word[i] ^= swap << 32;
        word[i + 4] ^= swap;
    }
    for (int i = 0; i < 8; i += i & 1 ? 3 : 1) { /* 0, 1, 4, 5 */
        uint64_t swap = (word[i] >> 16 ^ word[i + 2]) & 0x0000FFFF0000FFFFu;
        word[i] ^= swap << 16;
        word[i + 2] ^= swap;
    }
    for (int i = 0; i < 8; i += 2) {
        uint64_t swap = (word[i] >> 8 ^ word[i + 1]) & 0x00FF00FF00FF00FFu;
        word[i] ^= swap << 8;
        word[i + 1] ^= swap;
    }
#endif
}

FOR_EACH_CPU static void shuffle(const uint8_t *restrict elements, uint8_t *restrict planes, size_t count, size_t width)
{
    size_t i = 0;
    if (width == 1) {
        memcpy(planes, elements, count);
        return;
    } else if (width % 8 == 0) {
        for (; i + 8 <= count; i += 8) {
            for (size_t column = 0; column < width; column += 8) {
                uint64_t word[8];
                for (size_t k = 0; k < 8; k++) { /* one copy of 64 bytes halves the speed */
                    memcpy(&word[k], elements + width * (i + k) + column, 8);
                }
                transpose(word);
                for (size_t j = 0; j < 8; j++) {
                    memcpy(planes + (column + j) * count + i, &word[j], 8);
                }
            }
        }
    } else if (width == 4) {
        for (; i < count; i++) {
            uint32_t word;
            memcpy(&word, elements + 4 * i, 4);
            planes[i] = (uint8_t)word;
            planes[count + i] = (uint8_t)(word >> 8);
            planes[2 * count + i] = (uint8_t)(word >> 16);
            planes[3 * count + i] = (uint8_t)(word >> 24);
        }
    } else if (width == 2) {
        for (; i < count; i++) {
            planes[i] = elements[2 * i];
            planes[count + i] = elements[2 * i + 1];
        }
    }
    for (; i < count; i += 64) {
        size_t some = count - i < 64 ? count - i : 64;
        for (size_t j = 0; j < width; j++) {
            for (size_t k = 0; k < some; k++) {
                planes[j * count + i + k] = elements[(i + k) * width + j];
            }
        }
    }
}

/* -- XOR with the row before --------------------------------------------------------------------------------------- */

/* Undoes XOR in rows of `words` words, a constant. */
#define UNDO_XOR_OF_WORDS(type, words)                                                                                 \
    do {                                                                                                               \
        type sum[words];                                                                                               \
        memcpy(sum, rows + (begin - 1) * sizeof sum, sizeof sum);                                                      \
        for (size_t i = begin; i < end; i++) {                                                                         \
            type next[words];                                                                                          \
            memcpy(next, rows + i * sizeof sum, sizeof sum);                                                           \
            for (size_t k = 0; k < words; k++) {                                                                       \
                sum[k] ^= next[k];                                                                                     \
            }                                                                                                          \
            memcpy(rows + i * sizeof sum, sum, sizeof sum);                                                            \
        }                                                                                                              \
    } while (0)

FOR_EACH_CPU static void undo_xor_rows(uint8_t *restrict rows, size_t begin, size_t end, size_t row_size)
{
    switch (row_size) {
    case 1: UNDO_XOR_OF_WORDS(uint8_t, 1); return;
    case 2: UNDO_XOR_OF_WORDS(uint16_t, 1); return;
    case 4: UNDO_XOR_OF_WORDS(uint32_t, 1); return;
    case 8: UNDO_XOR_OF_WORDS(uint64_t, 1); return;
    case 16: UNDO_XOR_OF_WORDS(uint64_t, 2); return;
    case 32: UNDO_XOR_OF_WORDS(uint64_t, 4); return;
    }
    for (size_t i = begin; i < end; i++) {
        uint8_t *row = rows + i * row_size;
        const uint8_t *before = row - row_size; /* the two do not overlap */
#pragma GCC ivdep
        for (size_t k = 0; k < row_size; k++) {
            row[k] ^= before[k];
        }
    }
}

/* -- changed words only -------------------------------------------------------------------------------------------- */

static const char *const ENDS_EARLY = "the changes of a column end early";

static uint32_t number_at(const uint8_t *data)
{
    uint32_t number;
    memcpy(&number, data, 4);
    return number;
}

/* Writes the changed words of a row. row: NULL to only check them. Returns an error message, or NULL. */
static inline __attribute__((always_inline)) const char *put_changes(uint8_t *row, const uint8_t *words,
                                                                     const uint8_t *gaps, size_t count,
                                                                     size_t row_words, size_t word_size,
                                                                     size_t gap_size)
{
    size_t position = 0;
    for (size_t i = 0; i < count; i++) {
        uint32_t gap = 0;
        memcpy(&gap, gaps + i * gap_size, gap_size);
        position += gap;
        if (position >= row_words) {
            return "a change of a column is outside its row";
        }
        if (row != NULL) {
            memcpy(row + position * word_size, words + i * word_size, word_size);
        }
    }
    return NULL;
}

/* Decodes `wanted` rows, from row begin on, into out. scratch: space for one row. Returns an error message, or NULL. */
static const char *changed_rows(const uint8_t *data, size_t size, size_t rows, size_t begin, uint8_t *out,
                                size_t wanted, size_t row_size, uint8_t *scratch)
{
    size_t word = row_size % 8 == 0 ? 8 : row_size % 4 == 0 ? 4 : row_size % 2 == 0 ? 2 : 1;
    size_t row_words = row_size / word, gap = row_words <= 1 << 16 ? 2 : 4;
    size_t at = row_size, end = begin + wanted, row = 1;
    uint8_t *last = begin == 0 && wanted > 0 ? out : scratch;
    if (size < row_size) {
        return ENDS_EARLY;
    }
    memcpy(last, data, row_size);
    while (row < end) {
        if (size - at < 4) {
            return ENDS_EARLY;
        }
        size_t count = number_at(data + at);
        if (count == 0 || count > rows - row) {
            return "the changes of a column do not match its rows";
        }
        const uint8_t *counts = data + at + 4;
        at += 4;
        if ((size - at) / 4 < count) {
            return ENDS_EARLY;
        }
        at += 4 * count;
        uint64_t total = 0;
        for (size_t i = 0; i < count; i++) {
            total += number_at(counts + 4 * i);
        }
        if (total > (size - at) / (word + gap)) {
            return ENDS_EARLY;
        }
        const uint8_t *words = data + at, *gaps = words + total * word;
        at += total * (word + gap);
        for (size_t i = 0; i < count; i++, row++) {
            size_t changes = number_at(counts + 4 * i);
            uint8_t *target = row >= end ? NULL : row >= begin ? out + (row - begin) * row_size : scratch;
            if (target != NULL && target != last) {
                memcpy(target, last, row_size);
            }
            /* Constant sizes let the compiler inline the copies. */
            const char *problem = changes > row_words ? "a change of a column is outside its row"
                                  : word == 8 && gap == 2
                                      ? put_changes(target, words, gaps, changes, row_words, 8, 2)
                                      : put_changes(target, words, gaps, changes, row_words, word, gap);
            if (problem != NULL) {
                return problem;
            }
            last = target != NULL ? target : last;
            words += changes * word;
            gaps += changes * gap;
        }
    }
    return row >= rows && at != size ? "excess bytes after the changes of a column" : NULL;
}

/* -- distinct rows ------------------------------------------------------------------------------------------------- */

enum {
    MOST_PROBES = 128, /* more collide only if rows were made to; that would be slow */
    AT_ONCE = 256,     /* codes unpacked before their rows are copied; a multiple of 8 */
};

static inline uint64_t mixed(uint64_t a, uint64_t b)
{
#ifdef __SIZEOF_INT128__
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
#else
    a = (a ^ a >> 32) * 0x9E3779B97F4A7C15u;
    return a ^ a >> 32 ^ (b ^ b >> 32) * 0xE7037ED1A0B428DBu;
#endif
}

static inline __attribute__((always_inline)) uint64_t word_at(const uint8_t *data, size_t size)
{
    uint64_t word = 0;
    memcpy(&word, data, size);
    return word;
}

/* Hashes 32 bytes. a, b: the hash of those before; two, which the processor computes side by side. */
static inline void hash_32(const uint8_t *first, const uint8_t *second, uint64_t *a, uint64_t *b)
{
    *a = mixed(word_at(first, 8) ^ 0x9E3779B97F4A7C15u, word_at(first + 8, 8) ^ *a);
    *b = mixed(word_at(second, 8) ^ 0xE7037ED1A0B428DBu, word_at(second + 8, 8) ^ *b);
}

/* Hashes a row; the upper bits are the better ones. Bytes at its end may be hashed twice. */
static inline __attribute__((always_inline)) uint64_t hash_of(const uint8_t *row, size_t size)
{
    uint64_t a = size, b = 1;
    const uint8_t *end = row + size;
    if (size <= 8) {
        a = word_at(row, size);
    } else if (size < 16) {
        a = mixed(word_at(row, 8) ^ 0x9E3779B97F4A7C15u, word_at(end - 8, 8) ^ 0xE7037ED1A0B428DBu);
    } else if (size < 32) {
        hash_32(row, end - 16, &a, &b);
        a ^= b;
    } else {
        for (; end - row > 32; row += 32) {
            hash_32(row, row + 16, &a, &b);
        }
        hash_32(end - 32, end - 16, &a, &b);
        a ^= b;
    }
    return a * 0x9E3779B97F4A7C15u;
}

/* Finds the distinct rows, and which of them each row is. slots: 1 << bits of them, at least 2 * most, zeros. Returns
 * how many are distinct; 0 if more than `most` are, or too many hashes collide. */
static inline __attribute__((always_inline)) size_t find_distinct(const uint8_t *rows, size_t count, size_t size,
                                                                  size_t most, const uint8_t **distinct,
                                                                  uint16_t *which, uint32_t *slots, int bits)
{
    size_t found = 0, mask = ((size_t)1 << bits) - 1;
    for (size_t i = 0; i < count; i++) {
        const uint8_t *row = rows + i * size;
        if (size > 16 && i > 0 && memcmp(row, row - size, size) == 0) { /* common, and cheaper than a hash */
            which[i] = which[i - 1];
            continue;
        }
        uint64_t hash = hash_of(row, size);
        size_t slot = (size_t)(hash >> (64 - bits));
        uint32_t tag = (uint32_t)hash << 17, value; /* a slot: 15 bits of the hash, and 1 more than the index */
        for (int probes = 0; (value = slots[slot]) != 0; slot = (slot + 1) & mask) {
            if ((value ^ tag) >> 17 == 0 && memcmp(distinct[(value & 0x1FFFF) - 1], row, size) == 0) {
                break;
            }
            if (++probes == MOST_PROBES) {
                return 0;
            }
        }
        if (value == 0) {
            if (found == most) {
                return 0;
            }
            distinct[found++] = row;
            value = slots[slot] = tag | (uint32_t)found;
        }
        which[i] = (uint16_t)((value & 0x1FFFF) - 1);
    }
    return found;
}

FOR_EACH_CPU static size_t distinct_rows(const uint8_t *rows, size_t count, size_t size, size_t most,
                                         const uint8_t **distinct, uint16_t *which, uint32_t *slots, int bits)
{
    switch (size) { /* constant sizes let the compiler inline the comparisons */
    case 1: return find_distinct(rows, count, 1, most, distinct, which, slots, bits);
    case 2: return find_distinct(rows, count, 2, most, distinct, which, slots, bits);
    case 4: return find_distinct(rows, count, 4, most, distinct, which, slots, bits);
    case 8: return find_distinct(rows, count, 8, most, distinct, which, slots, bits);
    }
    return find_distinct(rows, count, size, most, distinct, which, slots, bits);
}

static _Thread_local size_t compared; /* bytes of the rows that are being sorted */

static int compare_rows(const void *a, const void *b)
{
    return memcmp(*(const uint8_t *const *)a, *(const uint8_t *const *)b, compared);
}

static size_t code_bits(size_t distinct)
{
    return distinct <= 2 ? 1 : distinct <= 4 ? 2 : distinct <= 16 ? 4 : distinct <= 256 ? 8 : 16;
}

/* Packs codes of `bits` bits, a constant. */
#define PACK_CODES(bits)                                                                                               \
    for (; i + 8 / (bits) <= count; i += 8 / (bits)) {                                                                 \
        uint32_t byte = 0;                                                                                             \
        for (size_t j = 0; j < 8 / (bits); j++) {                                                                      \
            byte |= (uint32_t)codes[i + j] << (j * (bits));                                                            \
        }                                                                                                              \
        *out++ = (uint8_t)byte;                                                                                        \
    }

FOR_EACH_CPU static void pack_codes(const uint16_t *codes, size_t count, size_t bits, uint8_t *out)
{
    size_t i = 0;
    switch (bits) {
    case 1: PACK_CODES(1); break;
    case 2: PACK_CODES(2); break;
    case 4: PACK_CODES(4); break;
    case 8: PACK_CODES(8); break;
    default: memcpy(out, codes, 2 * count); return;
    }
    uint32_t byte = 0;
    for (size_t j = 0; i + j < count; j++) {
        byte |= (uint32_t)codes[i + j] << (j * bits);
    }
    if (i < count) {
        *out = (uint8_t)byte;
    }
}

/* Writes the distinct rows, sorted and XORed, and the codes of all rows. Returns how many bytes; 0 if they do not fit
 * or find_distinct() gives up, SIZE_MAX without memory. */
static size_t put_dictionary(const uint8_t *rows, size_t count, size_t size, size_t most, uint8_t *out, size_t space)
{
    int bits = 4;
    while ((size_t)1 << bits < 2 * most) {
        bits++;
    }
    uint32_t *slots = calloc((size_t)1 << bits, sizeof *slots);
    const uint8_t **distinct = malloc((most + 1) * sizeof *distinct);
    uint16_t *which = malloc((count + most + 1) * sizeof *which);
    size_t written = SIZE_MAX;
    if (slots != NULL && distinct != NULL && which != NULL) {
        size_t found = distinct_rows(rows, count, size, most, distinct, which, slots, bits);
        size_t code = code_bits(found), total = 4 + found * size + (count * code + 7) / 8;
        written = found > 0 && total <= space ? total : 0;
        if (written > 0) {
            uint16_t *rank = which + count;
            uint8_t *table = out + 4;
            compared = size;
            qsort(distinct, found, sizeof *distinct, compare_rows);
            for (size_t i = 0; i < found; i++) {
                rank[which[(size_t)(distinct[i] - rows) / size]] = (uint16_t)i;
                memcpy(table + i * size, distinct[i], size);
            }
            for (size_t i = 0; i < count; i++) {
                which[i] = rank[which[i]];
            }
            for (size_t i = found * size; i-- > size;) {
                table[i] ^= table[i - size];
            }
            uint32_t stored = (uint32_t)found;
            memcpy(out, &stored, 4);
            pack_codes(which, count, code, table + found * size);
        }
    }
    free(slots);
    free(distinct);
    free(which);
    return written;
}

FOR_EACH_CPU static uint16_t unpack_codes(const uint8_t *data, size_t begin, size_t count, size_t bits, uint16_t *codes)
{
    uint16_t most = 0;
    if (bits == 16) {
        memcpy(codes, data + 2 * begin, 2 * count);
    } else {
        size_t per_byte = 8 / bits;
        uint16_t mask = (uint16_t)((1 << bits) - 1);
        data += begin / per_byte;
        for (size_t i = 0; i < (count + per_byte - 1) / per_byte; i++) { /* may fill up the last byte: see AT_ONCE */
            for (size_t j = 0; j < per_byte; j++) {
                codes[i * per_byte + j] = data[i] >> (j * bits) & mask;
            }
        }
    }
    for (size_t i = 0; i < count; i++) {
        most = codes[i] > most ? codes[i] : most;
    }
    return most;
}

#define COPY_ROWS(bytes)                                                                                               \
    for (size_t i = 0; i < some; i++) {                                                                                \
        memcpy(target + i * (bytes), table + codes[i] * (size_t)(bytes), bytes);                                       \
    }

/* Writes the rows of a dictionary. table: space for the distinct rows. Returns an error message, or NULL. */
static const char *dictionary_rows(const uint8_t *data, uint8_t *table, size_t distinct, size_t count, size_t size,
                                   uint8_t *out)
{
    size_t bits = code_bits(distinct);
    memcpy(table, data + 4, distinct * size);
    undo_xor_rows(table, 1, distinct, size);
    data += 4 + distinct * size;
    for (size_t begin = 0; begin < count; begin += AT_ONCE) {
        uint16_t codes[AT_ONCE];
        size_t some = count - begin < AT_ONCE ? count - begin : AT_ONCE;
        uint8_t *target = out + begin * size;
        if (unpack_codes(data, begin, some, bits, codes) >= distinct) {
            return "a code of a column is outside its table";
        }
        switch (size) { /* constant sizes let the compiler inline the copies */
        case 1: COPY_ROWS(1); break;
        case 2: COPY_ROWS(2); break;
        case 4: COPY_ROWS(4); break;
        case 8: COPY_ROWS(8); break;
        case 16: COPY_ROWS(16); break;
        default: COPY_ROWS(size);
        }
    }
    return NULL;
}

/* -- functions for Python ------------------------------------------------------------------------------------------ */

typedef struct {
    size_t rows, row_size, width, together; /* width: bytes of an element. together: number of rows encoded together */
} Layout;

/* together: 0 for all rows. Returns 0 and sets an exception if a buffer of `bytes` does not consist of such rows. */
static int layout_of(Layout *layout, Py_ssize_t bytes, Py_ssize_t row_size, Py_ssize_t width, Py_ssize_t together)
{
    if (row_size < 1 || width < 1 || together < 0 || row_size % width || bytes % row_size) {
        PyErr_SetString(PyExc_ValueError, "row_size and width do not divide the buffer");
        return 0;
    }
    layout->rows = (size_t)(bytes / row_size);
    layout->row_size = (size_t)row_size;
    layout->width = (size_t)width;
    layout->together = together ? (size_t)together : layout->rows;
    return 1;
}

static int are_equal(const Py_buffer *one, const Py_buffer *other)
{
    if (one->len != other->len) {
        PyErr_SetString(PyExc_ValueError, "buffers differ in size");
    }
    return one->len == other->len;
}

/* Ends a function: releases its buffers, the last one before NULL. Returns None; NULL if an exception is set. */
static PyObject *released(Py_buffer *buffer, ...)
{
    va_list others;
    va_start(others, buffer);
    for (; buffer != NULL; buffer = va_arg(others, Py_buffer *)) {
        PyBuffer_Release(buffer);
    }
    va_end(others);
    if (PyErr_Occurred()) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* Returns how many rows are encoded together from this row on. */
static size_t rows_from(const Layout *layout, size_t row)
{
    return layout->rows - row < layout->together ? layout->rows - row : layout->together;
}

static void undo_shuffle_rows(const uint8_t *planes, uint8_t *out, const Layout *layout, int in_rows, int is_xor)
{
    size_t elements_per_row = layout->row_size / layout->width, rows_per_pass = PASS_BYTES / layout->row_size;
    if (rows_per_pass == 0 || in_rows) {
        rows_per_pass = 1;
    }
    for (size_t first = 0, rows; first < layout->rows; first += rows) {
        const uint8_t *group = planes + first * layout->row_size;
        uint8_t *target = out + first * layout->row_size;
        rows = rows_from(layout, first);
        for (size_t row = 0; row < rows; row += rows_per_pass) {
            size_t end = row + rows_per_pass < rows ? row + rows_per_pass : rows;
            if (in_rows) {
                unshuffle(group + row * layout->row_size, target + row * layout->row_size, elements_per_row, 0,
                          elements_per_row, layout->width);
            } else {
                unshuffle(group, target + row * layout->row_size, rows * elements_per_row, row * elements_per_row,
                          end * elements_per_row, layout->width);
            }
            if (is_xor) {
                undo_xor_rows(target, row ? row : 1, end, layout->row_size);
            }
        }
    }
}

/* undo_shuffle(planes, out, row_size, width, in_rows, together, is_xor) */
static PyObject *undo_shuffle(PyObject *self, PyObject *args)
{
    Py_buffer planes, out;
    Py_ssize_t row_size, width, together;
    int in_rows, is_xor;
    Layout layout;
    if (!PyArg_ParseTuple(args, "y*w*nnpnp", &planes, &out, &row_size, &width, &in_rows, &together, &is_xor)) {
        return NULL;
    }
    if (are_equal(&planes, &out) && layout_of(&layout, out.len, row_size, width, together)) {
        Py_BEGIN_ALLOW_THREADS
        undo_shuffle_rows(planes.buf, out.buf, &layout, in_rows, is_xor);
        Py_END_ALLOW_THREADS
    }
    return released(&planes, &out, NULL);
}

/* shuffle(elements, planes, row_size, width, together) */
static PyObject *shuffle_(PyObject *self, PyObject *args)
{
    Py_buffer elements, planes;
    Py_ssize_t row_size, width, together;
    Layout layout;
    if (!PyArg_ParseTuple(args, "y*w*nnn", &elements, &planes, &row_size, &width, &together)) {
        return NULL;
    }
    if (are_equal(&elements, &planes) && layout_of(&layout, elements.len, row_size, width, together)) {
        Py_BEGIN_ALLOW_THREADS
        for (size_t row = 0, rows; row < layout.rows; row += rows) {
            rows = rows_from(&layout, row);
            shuffle((uint8_t *)elements.buf + row * layout.row_size, (uint8_t *)planes.buf + row * layout.row_size,
                    rows * (layout.row_size / layout.width), layout.width);
        }
        Py_END_ALLOW_THREADS
    }
    return released(&elements, &planes, NULL);
}

/* undo_xor(rows, row_size, together) */
static PyObject *undo_xor(PyObject *self, PyObject *args)
{
    Py_buffer rows;
    Py_ssize_t row_size, together;
    Layout layout;
    if (!PyArg_ParseTuple(args, "w*nn", &rows, &row_size, &together)) {
        return NULL;
    }
    if (layout_of(&layout, rows.len, row_size, 1, together)) {
        Py_BEGIN_ALLOW_THREADS
        for (size_t row = 0, count; row < layout.rows; row += count) {
            count = rows_from(&layout, row);
            if (count > 1) {
                undo_xor_rows((uint8_t *)rows.buf + row * layout.row_size, 1, count, layout.row_size);
            }
        }
        Py_END_ALLOW_THREADS
    }
    return released(&rows, NULL);
}

/* undo_changes(data, rows, begin, out, row_size): raises ValueError for damaged data. */
static PyObject *undo_changes(PyObject *self, PyObject *args)
{
    Py_buffer data, out;
    Py_ssize_t rows, begin, row_size;
    const char *problem = NULL;
    Layout layout;
    if (!PyArg_ParseTuple(args, "y*nnw*n", &data, &rows, &begin, &out, &row_size)) {
        return NULL;
    }
    uint8_t *scratch = row_size > 0 ? PyMem_Malloc((size_t)row_size) : NULL;
    if (!layout_of(&layout, out.len, row_size, 1, 0)) {
    } else if (begin < 0 || rows < 1 || begin > rows || layout.rows > (size_t)(rows - begin)) {
        PyErr_SetString(PyExc_ValueError, "rows out of range");
    } else if (scratch == NULL) {
        PyErr_NoMemory();
    } else {
        Py_BEGIN_ALLOW_THREADS
        problem = changed_rows(data.buf, (size_t)data.len, (size_t)rows, (size_t)begin, out.buf, layout.rows,
                               (size_t)row_size, scratch);
        Py_END_ALLOW_THREADS
        if (problem != NULL) {
            PyErr_SetString(PyExc_ValueError, problem);
        }
    }
    PyMem_Free(scratch);
    return released(&data, &out, NULL);
}

/* dictionary(rows, out, row_size, most): the number of bytes that it wrote; 0 if it gave up. */
static PyObject *dictionary(PyObject *self, PyObject *args)
{
    Py_buffer rows, out;
    Py_ssize_t row_size, most;
    Layout layout;
    if (!PyArg_ParseTuple(args, "y*w*nn", &rows, &out, &row_size, &most)) {
        return NULL;
    }
    size_t written = 0;
    if (!layout_of(&layout, rows.len, row_size, 1, 0)) {
    } else if (most < 0 || most > 1 << 16) {
        PyErr_SetString(PyExc_ValueError, "number of distinct rows out of range");
    } else {
        Py_BEGIN_ALLOW_THREADS
        written = put_dictionary(rows.buf, layout.rows, layout.row_size, (size_t)most, out.buf, (size_t)out.len);
        Py_END_ALLOW_THREADS
        if (written == SIZE_MAX) {
            PyErr_NoMemory();
        }
    }
    PyBuffer_Release(&rows);
    PyBuffer_Release(&out);
    return PyErr_Occurred() ? NULL : PyLong_FromSize_t(written);
}

/* undo_dictionary(data, out, row_size): raises ValueError for damaged data. */
static PyObject *undo_dictionary(PyObject *self, PyObject *args)
{
    Py_buffer data, out;
    Py_ssize_t row_size;
    Layout layout;
    if (!PyArg_ParseTuple(args, "y*w*n", &data, &out, &row_size)) {
        return NULL;
    }
    size_t distinct = data.len < 4 ? 0 : number_at(data.buf);
    uint8_t *table = NULL;
    if (!layout_of(&layout, out.len, row_size, 1, 0)) {
    } else if (distinct < 1 || distinct > layout.rows || distinct > 1 << 16 ||
               (size_t)data.len != 4 + distinct * layout.row_size + (layout.rows * code_bits(distinct) + 7) / 8) {
        PyErr_SetString(PyExc_ValueError, "the size of a dictionary does not match its rows");
    } else if ((table = PyMem_Malloc(distinct * layout.row_size)) == NULL) {
        PyErr_NoMemory();
    } else {
        const char *problem;
        Py_BEGIN_ALLOW_THREADS
        problem = dictionary_rows(data.buf, table, distinct, layout.rows, layout.row_size, out.buf);
        Py_END_ALLOW_THREADS
        if (problem != NULL) {
            PyErr_SetString(PyExc_ValueError, problem);
        }
    }
    PyMem_Free(table);
    return released(&data, &out, NULL);
}

/* -- rows ---------------------------------------------------------------------------------------------------------- */

/* copy_runs(source, out, begins, targets, counts, row_size): copies rows begins[i] to begins[i] + counts[i] of source to
 * row targets[i] of out, for each i; all three are int64. */
static PyObject *copy_runs(PyObject *self, PyObject *args)
{
    Py_buffer source, out, begins, targets, counts;
    Py_ssize_t row_size;
    int is_inside = 1;
    if (!PyArg_ParseTuple(args, "y*w*y*y*y*n", &source, &out, &begins, &targets, &counts, &row_size)) {
        return NULL;
    }
    const int64_t *begin = begins.buf, *target = targets.buf, *count = counts.buf;
    Py_ssize_t runs = counts.len / 8;
    if (begins.len != counts.len || targets.len != counts.len || counts.len % 8 || row_size < 1) {
        PyErr_SetString(PyExc_ValueError, "buffers differ in size");
    } else {
        int64_t rows = source.len / row_size, places = out.len / row_size;
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t i = 0; is_inside && i < runs; i++) {
            is_inside = count[i] >= 0 && begin[i] >= 0 && target[i] >= 0 && count[i] <= rows && count[i] <= places &&
                        begin[i] <= rows - count[i] && target[i] <= places - count[i];
            if (is_inside) {
                memcpy((uint8_t *)out.buf + target[i] * row_size, (const uint8_t *)source.buf + begin[i] * row_size,
                       (size_t)(count[i] * row_size));
            }
        }
        Py_END_ALLOW_THREADS
        if (!is_inside) {
            PyErr_SetString(PyExc_ValueError, "rows outside the memory");
        }
    }
    return released(&source, &out, &begins, &targets, &counts, NULL);
}

/* -- logs of rings ------------------------------------------------------------------------------------------------- */

/* entry_offsets(memory, begin, end, sequence): the offsets of the complete entries of a log, as int64. */
static PyObject *entry_offsets(PyObject *self, PyObject *args)
{
    Py_buffer memory;
    Py_ssize_t at, end;
    unsigned long long sequence;
    if (!PyArg_ParseTuple(args, "y*nnK", &memory, &at, &end, &sequence)) {
        return NULL;
    }
    const uint8_t *bytes = memory.buf;
    int64_t *found = NULL;
    size_t count = 0, space = 0;
    if (at < 0 || end > memory.len) {
        PyErr_SetString(PyExc_ValueError, "a log outside the memory");
    } else {
        for (uint64_t mark = (sequence << 32) + 1; at <= end - (Py_ssize_t)sizeof(LogEntry); mark++) {
            LogEntry entry;
            memcpy(&entry, bytes + at, sizeof entry);
            int64_t following = at + (int64_t)sizeof entry + (((int64_t)entry.length + 7) & ~(int64_t)7);
            if (entry.mark != mark || following > end) {
                break;
            }
            if (count == space) {
                space = space ? 2 * space : 1024;
                int64_t *more = PyMem_Realloc(found, space * sizeof *found);
                if (more == NULL) {
                    PyErr_NoMemory();
                    break;
                }
                found = more;
            }
            found[count++] = at;
            at = (Py_ssize_t)following;
        }
    }
    PyObject *result = NULL;
    if (!PyErr_Occurred()) {
        result = PyBytes_FromStringAndSize((const char *)found, (Py_ssize_t)(count * sizeof *found));
    }
    PyMem_Free(found);
    PyBuffer_Release(&memory);
    return result;
}

/* slices(memory, begins, ends): a list of bytes; begins and ends are int64. */
static PyObject *slices(PyObject *self, PyObject *args)
{
    Py_buffer memory, begins, ends;
    if (!PyArg_ParseTuple(args, "y*y*y*", &memory, &begins, &ends)) {
        return NULL;
    }
    const int64_t *begin = begins.buf, *end = ends.buf;
    Py_ssize_t count = begins.len / 8;
    PyObject *result = NULL;
    if (begins.len != ends.len || begins.len % 8) {
        PyErr_SetString(PyExc_ValueError, "buffers differ in size");
    } else {
        result = PyList_New(count);
    }
    for (Py_ssize_t i = 0; result != NULL && i < count; i++) {
        PyObject *slice = NULL;
        if (begin[i] < 0 || begin[i] > end[i] || end[i] > memory.len) {
            PyErr_SetString(PyExc_ValueError, "a slice outside the memory");
        } else {
            slice = PyBytes_FromStringAndSize((const char *)memory.buf + begin[i], (Py_ssize_t)(end[i] - begin[i]));
        }
        if (slice == NULL) {
            Py_CLEAR(result);
        } else {
            PyList_SET_ITEM(result, i, slice);
        }
    }
    PyBuffer_Release(&memory);
    PyBuffer_Release(&begins);
    PyBuffer_Release(&ends);
    return result;
}

/* -- BLAKE2b ------------------------------------------------------------------------------------------------------- */

enum { HASHED = 128, DIGEST = 16 }; /* bytes hashed at once; bytes of a digest */

typedef uint64_t Four __attribute__((vector_size(32))); /* the same word of four messages */
typedef uint64_t State[8];                              /* zeros before the first byte, then its XOR with START */

static const State START = {0x6A09E667F3BCC908u ^ 0x01010000u ^ DIGEST,
                            0xBB67AE8584CAA73Bu,
                            0x3C6EF372FE94F82Bu,
                            0xA54FF53A5F1D36F1u,
                            0x510E527FADE682D1u,
                            0x9B05688C2B3E6C1Fu,
                            0x1F83D9ABFB41BD6Bu,
                            0x5BE0CD19137E2179u};
static const uint8_t ORDER[10][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0}};

#define ROTATED(word, bits) ((word) >> (bits) | (word) << (64 - (bits)))

static inline __attribute__((always_inline)) void mix(Four *v, int a, int b, int c, int d, const Four *x, const Four *y)
{
    v[a] += v[b] + *x;
    v[d] = ROTATED(v[d] ^ v[a], 32);
    v[c] += v[d];
    v[b] = ROTATED(v[b] ^ v[c], 24);
    v[a] += v[b] + *y;
    v[d] = ROTATED(v[d] ^ v[a], 16);
    v[c] += v[d];
    v[b] = ROTATED(v[b] ^ v[c], 63);
}

static inline uint64_t message_word(const uint8_t *bytes, int number)
{
    uint64_t word;
    memcpy(&word, bytes + 8 * number, 8);
    return word;
}

/* Hashes `size` bytes of four messages, by RFC 7693. states: word by word, of all four. done: bytes before these. */
static inline __attribute__((always_inline)) void hash_bytes(Four *states, const uint8_t *const *bytes, size_t size,
                                                             uint64_t done, int is_last)
{
    for (size_t at = 0; at < size; at += HASHED) {
        size_t some = size - at < HASHED ? size - at : HASHED;
        Four v[16], words[16];
        uint8_t padded[4][HASHED];
        const uint8_t *block[4];
        for (int k = 0; k < 4; k++) {
            block[k] = bytes[k] + at;
            if (some < HASHED) { /* the last one */
                block[k] = memcpy(memset(padded[k], 0, HASHED), block[k], some);
            }
        }
        for (int i = 0; i < 16; i++) {
            words[i] = (Four){message_word(block[0], i), message_word(block[1], i), message_word(block[2], i),
                              message_word(block[3], i)};
            v[i] = START[i & 7] ^ (i < 8 ? states[i] : (Four){0});
        }
        v[8] ^= 0x01010000u ^ DIGEST;
        v[12] ^= done + at + some;
        v[14] = is_last && size - at <= HASHED ? ~v[14] : v[14];
#pragma GCC unroll 12
        for (int round = 0; round < 12; round++) {
            const uint8_t *order = ORDER[round % 10];
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++) { /* columns, then diagonals */
                int b = 4 + ((i + i / 4) & 3), c = 8 + ((i + i / 4 * 2) & 3), d = 12 + ((i + i / 4 * 3) & 3);
                mix(v, i & 3, b, c, d, words + order[2 * i], words + order[2 * i + 1]);
            }
        }
        for (int i = 0; i < 8; i++) {
            states[i] ^= v[i] ^ v[8 + i];
        }
    }
}

FOR_EACH_CPU static void hash_anywhere(Four *states, const uint8_t *const *bytes, size_t size, uint64_t done,
                                       int is_last)
{
    hash_bytes(states, bytes, size, done, is_last);
}

static int can_rotate; /* vectors, by one instruction */

#ifdef IS_X86
__attribute__((target("avx512vl"))) static void hash_rotating(Four *states, const uint8_t *const *bytes, size_t size,
                                                              uint64_t done, int is_last)
{
    hash_bytes(states, bytes, size, done, is_last);
}
#else
#define hash_rotating hash_anywhere
#endif

/* Hashes a block, the bytes from done on, of each of up to four messages. is_last: the states become digests. */
static void hash_four(State *states, const uint8_t *blocks, size_t block, size_t size, size_t count, uint64_t done,
                      int is_last)
{
    Four joined[8] = {{0}};
    const uint8_t *bytes[4];
    for (size_t k = 0; k < 4; k++) {
        bytes[k] = blocks + (k < count ? k : 0) * block;
        for (size_t i = 0; k < count && i < 8; i++) {
            joined[i][k] = states[k][i];
        }
    }
    (can_rotate ? hash_rotating : hash_anywhere)(joined, bytes, size, done, is_last);
    for (size_t k = 0; k < count; k++) {
        for (size_t i = 0; i < 8; i++) {
            states[k][i] = joined[i][k] ^ (is_last ? START[i] : 0);
        }
    }
}

/* hash_blocks(states, data, block, done, last): adds a block to each message. last: index of the first one to end. */
static PyObject *hash_blocks(PyObject *self, PyObject *args)
{
    Py_buffer states, data;
    Py_ssize_t block, last;
    unsigned long long done;
    if (!PyArg_ParseTuple(args, "w*y*nKn", &states, &data, &block, &done, &last)) {
        return NULL;
    }
    Py_ssize_t count = states.len / (Py_ssize_t)sizeof(State), step;
    int is_right = block > 0 && block % HASHED == 0 && data.len > 0 && (data.len - 1) / block + 1 == count &&
                   states.len % (Py_ssize_t)sizeof(State) == 0 && last >= 0 && (last < count || data.len % block == 0);
    if (is_right) {
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t i = 0; i < count; i += step) {
            Py_ssize_t whole = (i < last ? (last < count ? last : count) : data.len / block) - i;
            step = whole < 1 ? 1 : whole < 4 ? whole : 4;
            Py_ssize_t size = whole < 1 ? data.len % block : block;
            hash_four((State *)states.buf + i, (const uint8_t *)data.buf + i * block, (size_t)block, (size_t)size,
                      (size_t)step, done, i >= last);
        }
        Py_END_ALLOW_THREADS
    } else {
        PyErr_SetString(PyExc_ValueError, "blocks do not match the size of their states");
    }
    return released(&states, &data, NULL);
}

static PyMethodDef functions[] = {
    {"crc32", (PyCFunction)(void (*)(void))crc32_, METH_FASTCALL, NULL},
    {"shuffle", shuffle_, METH_VARARGS, NULL},
    {"undo_shuffle", undo_shuffle, METH_VARARGS, NULL},
    {"undo_xor", undo_xor, METH_VARARGS, NULL},
    {"undo_changes", undo_changes, METH_VARARGS, NULL},
    {"dictionary", dictionary, METH_VARARGS, NULL},
    {"undo_dictionary", undo_dictionary, METH_VARARGS, NULL},
    {"copy_runs", copy_runs, METH_VARARGS, NULL},
    {"entry_offsets", entry_offsets, METH_VARARGS, NULL},
    {"slices", slices, METH_VARARGS, NULL},
    {"hash_blocks", hash_blocks, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, .m_name = "_kernels", .m_size = -1, .m_methods = functions};

PyMODINIT_FUNC PyInit__kernels(void)
{
    make_crc_table();
#ifdef IS_X86
    __builtin_cpu_init();
    can_fold = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
    can_rotate = __builtin_cpu_supports("avx512vl");
#endif
    PyObject *kernels = PyModule_Create(&module);
    if (kernels == NULL || PyModule_AddIntConstant(kernels, "ABI", KERNELS_ABI) < 0) {
        Py_XDECREF(kernels);
        return NULL;
    }
    return kernels;
}
