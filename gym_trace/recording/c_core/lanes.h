/* Inner loops over a full slab of lanes: make the fragments of its steps, and reorder its rows as stored in chunks.
 *
 * The twins of functions in gym_trace/format/ring/lanes/decoder.py and events.py. Recorders use them for usual steps;
 * readers use Python, because their rings are untrusted.
 */
#pragma once
#include "log.h"

/* The end of an episode. */
typedef struct {
    int64_t lane, time, episode; /* episode: id of the next one, if that starts in the slab */
    int flags;
} End;

typedef struct {
    int64_t lanes, times;
    const char *terminated, *truncated; /* (times, lanes) */
    const int64_t *utc, *monotonic;
    Lane *states;
    End *ends;
    int64_t count, room, episodes;
} Pass;

static int add_end(Pass *pass, int64_t lane, int64_t time, int flags)
{
    if (pass->count == pass->room) {
        int64_t room = pass->room ? 2 * pass->room : 256;
        End *ends = PyMem_Realloc(pass->ends, (size_t)room * sizeof(End));
        if (ends == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        pass->ends = ends;
        pass->room = room;
    }
    int64_t episode = time + 1 < pass->times ? pass->episodes++ : 0;
    pass->ends[pass->count++] = (End){lane, time, episode, flags};
    return 0;
}

/* Finds the ends of episodes, ordered by time. Returns 1; 0 if a step is in no episode; -1 with an exception.
 * resets: the time of each lane's last reset, or -1. */
static int find_ends(Pass *pass, int mode, int64_t *resets)
{
    for (int64_t time = 0; time < pass->times; time++) {
        const char *terminated = pass->terminated + time * pass->lanes;
        const char *truncated = pass->truncated + time * pass->lanes;
        for (int64_t lane = 0; lane < pass->lanes; lane++) {
            uint64_t words[2];
            while (lane + 8 <= pass->lanes) {
                memcpy(words, terminated + lane, 8);
                memcpy(words + 1, truncated + lane, 8);
                if (words[0] | words[1]) {
                    break;
                }
                lane += 8;
            }
            if (lane == pass->lanes) {
                break;
            }
            int flags = (terminated[lane] ? FRAGMENT_TERMINATED : 0) | (truncated[lane] ? FRAGMENT_TRUNCATED : 0);
            if (!flags || resets[lane] == time) {
                continue;
            }
            if (mode == SAME_STEP || (mode == DISABLED && time + 1 < pass->times)) {
                return 0;
            }
            if (add_end(pass, lane, time, flags) < 0) {
                return -1;
            }
            resets[lane] = time + 1;
        }
    }
    return 1;
}

/* Writes a row of the fragment table, for the rows begin to after of a lane, and updates the state of the lane.
 * starts: true if the first row is the initial observation of an episode. flags: set if the last one ends it. */
static void put_fragment(Pass *pass, Fragment *fragment, int64_t lane, int64_t begin, int64_t after, int starts,
                         int flags)
{
    Lane *state = pass->states + lane;
    int64_t utc = pass->utc[after - 1], monotonic = pass->monotonic[after - 1], steps = after - begin - starts;
    if (starts) {
        state->steps = 0;
        state->utc = pass->utc[begin];
        state->monotonic = pass->monotonic[begin];
        state->seed = NO_SEED;
    }
    *fragment = (Fragment){
        .episode = (uint64_t)state->episode,
        .first_step = (uint64_t)state->steps,
        .steps = (uint32_t)steps,
        .lane = (uint32_t)lane,
        .flags = (uint32_t)flags,
    };
    if (starts) {
        fragment->flags |= FRAGMENT_STARTS | FRAGMENT_HAS_INITIAL;
        fragment->seed = NO_SEED;
        fragment->start_time = state->utc;
        fragment->clock_offset = state->utc - state->monotonic;
    }
    if (flags) {
        fragment->flags |= FRAGMENT_STOPS | FRAGMENT_ENDS;
        fragment->outcome = flags & FRAGMENT_TERMINATED ? OUTCOME_TERMINATED : OUTCOME_TRUNCATED;
        fragment->duration = monotonic - state->monotonic;
        fragment->clock_drift = utc - state->utc - fragment->duration;
    }
    state->steps += steps;
    state->running = 1;
}

/* Writes the fragments of all lanes, and the indices of the rows that are initial observations of episodes.
 * order: indices of the ends, by lane. episode: id of the first episode that starts. */
static void put_fragments(Pass *pass, int mode, const int64_t *order, int64_t episode, Fragment *fragment,
                          int64_t *initial_rows)
{
    int64_t next = 0;
    for (int64_t lane = 0; lane < pass->lanes; lane++) {
        Lane *state = pass->states + lane;
        int64_t begin = 0;
        int starts = state->pending != 0;
        if (starts) {
            state->episode = episode++;
            *initial_rows++ = lane * pass->times;
        }
        while (next < pass->count && pass->ends[order[next]].lane == lane) {
            const End *end = &pass->ends[order[next++]];
            put_fragment(pass, fragment++, lane, begin, end->time + 1, starts, end->flags);
            begin = end->time + 1;
            starts = 1;
            if (begin < pass->times) {
                state->episode = end->episode;
                *initial_rows++ = lane * pass->times + begin;
            }
        }
        int is_over = begin == pass->times;
        if (!is_over) {
            put_fragment(pass, fragment++, lane, begin, pass->times, starts, 0);
        }
        state->open = (char)!is_over;
        state->pending = (char)(is_over && mode == NEXT_STEP);
    }
}

/* Sorts the indices of the ends by lane, then by time, into numbers. firsts: workspace, one element per lane. */
static void order_ends(const Pass *pass, int64_t *firsts, int64_t *numbers)
{
    memset(firsts, 0, (size_t)pass->lanes * sizeof(int64_t));
    for (int64_t i = 0; i < pass->count; i++) {
        firsts[pass->ends[i].lane] += 1;
    }
    for (int64_t lane = 0, before = 0; lane < pass->lanes; lane++) {
        int64_t own = firsts[lane];
        firsts[lane] = before;
        before += own;
    }
    for (int64_t i = 0; i < pass->count; i++) {
        numbers[firsts[pass->ends[i].lane]++] = i;
    }
}

/* Returns (fragments, initial_rows, episodes), or None for unusual steps; then the states are unchanged. */
static PyObject *fragments_of(Pass *pass, int mode, int64_t episode)
{
    int64_t pending = 0, later = 0;
    for (int64_t lane = 0; lane < pass->lanes; lane++) {
        const Lane *state = pass->states + lane;
        int is_open = state->open || (mode == NEXT_STEP && state->pending);
        if (!is_open || state->skipped || (mode != NEXT_STEP && state->pending)) {
            Py_RETURN_NONE;
        }
        pending += state->pending != 0;
    }
    int64_t *resets = PyMem_Malloc((size_t)pass->lanes * sizeof(int64_t)), *numbers = NULL;
    if (resets == NULL) {
        return PyErr_NoMemory();
    }
    for (int64_t lane = 0; lane < pass->lanes; lane++) {
        resets[lane] = pass->states[lane].pending ? 0 : -1;
    }
    pass->episodes = episode + pending;
    PyObject *result = NULL, *fragments = NULL, *initial_rows = NULL;
    int found = find_ends(pass, mode, resets);
    if (found <= 0) {
        result = found < 0 ? NULL : Py_NewRef(Py_None);
        goto done;
    }
    for (int64_t i = 0; i < pass->count; i++) {
        later += pass->ends[i].time + 1 < pass->times;
    }
    numbers = PyMem_Malloc((size_t)(pass->count + 1) * sizeof(int64_t));
    fragments = PyByteArray_FromStringAndSize(NULL, (pass->lanes + later) * (Py_ssize_t)sizeof(Fragment));
    initial_rows = PyByteArray_FromStringAndSize(NULL, (pending + later) * 8);
    if (numbers == NULL || fragments == NULL || initial_rows == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    order_ends(pass, resets, numbers);
    put_fragments(pass, mode, numbers, episode, (Fragment *)PyByteArray_AS_STRING(fragments),
                  (int64_t *)PyByteArray_AS_STRING(initial_rows));
    result = Py_BuildValue("OOL", fragments, initial_rows, (long long)pass->episodes);
done:
    PyMem_Free(resets);
    PyMem_Free(numbers);
    Py_XDECREF(fragments);
    Py_XDECREF(initial_rows);
    return result;
}

/* Returns 1 if an object is a C-contiguous array with items of this size and these dimensions; 0 columns: one
 * dimension. */
static int is_plain(PyObject *object, npy_intp width, npy_intp rows, npy_intp columns)
{
    PyArrayObject *array = (PyArrayObject *)object;
    return PyArray_Check(object) && PyArray_IS_C_CONTIGUOUS(array) && !PyDataType_REFCHK(PyArray_DESCR(array)) &&
           PyArray_ITEMSIZE(array) == width && PyArray_NDIM(array) == (columns ? 2 : 1) &&
           PyArray_DIM(array, 0) == rows && (!columns || PyArray_DIM(array, 1) == columns);
}

/* lane_fragments(states, terminations, truncations, utc, monotonic, mode, episodes): see _Decoding in
 * gym_trace/format/ring/lanes/decoder.py. */
static PyObject *lane_fragments(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *states, *terminated, *truncated, *utc, *monotonic;
    int mode;
    long long episode;
    if (!PyArg_ParseTuple(args, "O!O!O!O!O!iL:lane_fragments", &PyArray_Type, &states, &PyArray_Type, &terminated,
                          &PyArray_Type, &truncated, &PyArray_Type, &utc, &PyArray_Type, &monotonic, &mode, &episode)) {
        return NULL;
    }
    npy_intp lanes = PyArray_NDIM((PyArrayObject *)states) == 1 ? PyArray_DIM((PyArrayObject *)states, 0) : 0;
    npy_intp times = PyArray_NDIM((PyArrayObject *)utc) == 1 ? PyArray_DIM((PyArrayObject *)utc, 0) : 0;
    if (lanes < 1 || times < 1 || lanes > UINT32_MAX || times > UINT32_MAX || episode < 0 ||
        !is_plain(states, sizeof(Lane), lanes, 0) || !PyArray_ISWRITEABLE((PyArrayObject *)states) ||
        !is_plain(terminated, 1, times, lanes) || !is_plain(truncated, 1, times, lanes) ||
        !is_plain(utc, 8, times, 0) || !is_plain(monotonic, 8, times, 0)) {
        PyErr_SetString(PyExc_TypeError, "lane_fragments(): arrays that do not match");
        return NULL;
    }
    if (mode < NEXT_STEP || mode > DISABLED) {
        Py_RETURN_NONE; /* Python may support it, or raises */
    }
    Pass pass = {
        .lanes = lanes,
        .times = times,
        .terminated = PyArray_DATA((PyArrayObject *)terminated),
        .truncated = PyArray_DATA((PyArrayObject *)truncated),
        .utc = PyArray_DATA((PyArrayObject *)utc),
        .monotonic = PyArray_DATA((PyArrayObject *)monotonic),
        .states = PyArray_DATA((PyArrayObject *)states),
    };
    PyObject *result = fragments_of(&pass, mode, episode);
    PyMem_Free(pass.ends);
    return result;
}

/* Rows of these lanes at one time share few cache lines. Rows at these times are few enough that those lines stay in the
 * cache until all of their rows are copied. */
enum { LANES_AT_ONCE = 16, TIMES_AT_ONCE = 8 };

/* Rows by lane and time. excluded: indices of the rows to skip, lane * times + time, ascending. */
typedef struct {
    const char *from;
    npy_intp lane_stride, time_stride, width;
    int64_t lanes, times, count;
    const int64_t *excluded;
} Rows;

/* Copies rows if rows of consecutive times are adjacent. */
static void copy_runs(const Rows *rows, char *to)
{
    int64_t next_excluded = 0;
    for (int64_t lane = 0; lane < rows->lanes; lane++) {
        const char *from = rows->from + lane * rows->lane_stride;
        int64_t begin = 0;
        while (begin < rows->times) {
            int is_before_gap = next_excluded < rows->count && rows->excluded[next_excluded] < (lane + 1) * rows->times;
            int64_t end = is_before_gap ? rows->excluded[next_excluded++] - lane * rows->times : rows->times;
            size_t size = (size_t)((end - begin) * rows->width);
            memcpy(to, from + begin * rows->width, size);
            to += size;
            begin = end + 1;
        }
    }
}

/* Returns the time of the next row of a lane to skip, or INT64_MAX; advances *next, an index into excluded. */
static inline int64_t next_gap(const Rows *rows, int64_t lane, int64_t *next)
{
    int is_own = *next < rows->count && rows->excluded[*next] < (lane + 1) * rows->times;
    return is_own ? rows->excluded[(*next)++] - lane * rows->times : INT64_MAX;
}

/* Copies rows if rows of consecutive lanes are adjacent, LANES_AT_ONCE lanes and TIMES_AT_ONCE times at once. */
static inline __attribute__((always_inline)) void copy_rows(const Rows *rows, char *to, const npy_intp width)
{
    int64_t next_excluded = 0;
    for (int64_t first = 0; first < rows->lanes; first += LANES_AT_ONCE) {
        int64_t some = rows->lanes - first < LANES_AT_ONCE ? rows->lanes - first : LANES_AT_ONCE;
        int64_t next[LANES_AT_ONCE], gaps[LANES_AT_ONCE];
        char *at[LANES_AT_ONCE];
        for (int64_t i = 0; i < some; i++) {
            at[i] = to;
            next[i] = next_excluded;
            to += rows->times * width;
            while (next_gap(rows, first + i, &next_excluded) != INT64_MAX) {
                to -= width;
            }
            gaps[i] = next_gap(rows, first + i, &next[i]);
        }
        for (int64_t time = 0; time < rows->times; time += TIMES_AT_ONCE) {
            int64_t end = time + TIMES_AT_ONCE;
            const char *from = rows->from + first * rows->lane_stride + time * rows->time_stride;
            for (int64_t i = 0; i < some; i++, from += rows->lane_stride) {
                if (gaps[i] >= end && end <= rows->times) {
                    for (int64_t j = 0; j < TIMES_AT_ONCE; j++) {
                        memcpy(at[i] + j * width, from + j * rows->time_stride, (size_t)width);
                    }
                    at[i] += TIMES_AT_ONCE * width;
                    continue;
                }
                for (int64_t j = 0; j < TIMES_AT_ONCE && time + j < rows->times; j++) {
                    if (time + j == gaps[i]) {
                        gaps[i] = next_gap(rows, first + i, &next[i]);
                        continue;
                    }
                    memcpy(at[i], from + j * rows->time_stride, (size_t)width);
                    at[i] += width;
                }
            }
        }
    }
}

static void copy_in_order(const Rows *rows, char *to)
{
    if (rows->time_stride == rows->width) {
        copy_runs(rows, to);
        return;
    }
    switch (rows->width) { /* a constant width is copied by one instruction */
    case 1: copy_rows(rows, to, 1); break;
    case 4: copy_rows(rows, to, 4); break;
    case 8: copy_rows(rows, to, 8); break;
    case 16: copy_rows(rows, to, 16); break;
    default: copy_rows(rows, to, rows->width);
    }
}

/* lane_rows(column, excluded, out): the twin is in gym_trace/format/ring/lanes/events.py. */
static PyObject *lane_rows(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyArrayObject *column, *excluded, *out;
    if (!PyArg_ParseTuple(args, "O!O!O!:lane_rows", &PyArray_Type, &column, &PyArray_Type, &excluded, &PyArray_Type,
                          &out)) {
        return NULL;
    }
    int dimensions = PyArray_NDIM(column);
    npy_intp width = PyArray_ITEMSIZE(column);
    int is_right = dimensions >= 2 && is_number(PyArray_DESCR(column)) && is_number(PyArray_DESCR(out)) &&
                   PyArray_NDIM(excluded) == 1 && is_plain((PyObject *)excluded, 8, PyArray_DIM(excluded, 0), 0) &&
                   PyArray_IS_C_CONTIGUOUS(out) && PyArray_ISWRITEABLE(out);
    for (int i = dimensions - 1; is_right && i > 1; i--) { /* a row must have no gaps */
        is_right = PyArray_STRIDE(column, i) == width || PyArray_DIM(column, i) == 1;
        width *= PyArray_DIM(column, i);
    }
    int64_t last = -1, count = is_right ? PyArray_DIM(excluded, 0) : 0, all = 0;
    const int64_t *numbers = PyArray_DATA(excluded);
    if (is_right) {
        all = PyArray_DIM(column, 0) * PyArray_DIM(column, 1);
        is_right = width > 0 && count <= all && PyArray_NBYTES(out) == (all - count) * width;
    }
    for (int64_t i = 0; is_right && i < count; i++) {
        is_right = numbers[i] > last && numbers[i] < all;
        last = numbers[i];
    }
    if (!is_right) {
        PyErr_SetString(PyExc_TypeError, "lane_rows(): arrays that do not match");
        return NULL;
    }
    Rows rows = {
        .from = PyArray_BYTES(column),
        .lane_stride = PyArray_STRIDE(column, 0),
        .time_stride = PyArray_STRIDE(column, 1),
        .width = width,
        .lanes = PyArray_DIM(column, 0),
        .times = PyArray_DIM(column, 1),
        .count = count,
        .excluded = numbers,
    };
    char *to = PyArray_BYTES(out);
    Py_BEGIN_ALLOW_THREADS;
    copy_in_order(&rows, to);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}
