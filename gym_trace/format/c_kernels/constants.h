/* Constants and structures of Python's gym_trace, by tests/helpers/c_header.py. Do not edit. */
#pragma once
#include <stdint.h>

/* gym_trace/format/kernels.py and gym_trace/recording/core.py: of the compiled modules */
enum { KERNELS_ABI = 7, CORE_ABI = 14 };

/* gym_trace/data/vocabulary.py: flags of fragments */
enum {
    FRAGMENT_STARTS = 1,
    FRAGMENT_HAS_INITIAL = 2,
    FRAGMENT_TERMINATED = 4,
    FRAGMENT_TRUNCATED = 8,
    FRAGMENT_STOPS = 16,
    FRAGMENT_ENDS = 32,
    FRAGMENT_PLACEHOLDER = 64,
};

/* gym_trace/data/vocabulary.py: outcomes of episodes */
enum {
    OUTCOME_LOST = 0,
    OUTCOME_TERMINATED = 1,
    OUTCOME_TRUNCATED = 2,
    OUTCOME_CUT = 3,
    OUTCOME_CLOSED = 4,
    OUTCOME_RUNNING = 5,
};

/* gym_trace/format/wire.py */
enum { NO_SEED = -1 };

/* gym_trace/format/ring/log.py: kinds of entries */
enum { LOG_START = 1, LOG_FLAG = 3, LOG_VALUE = 6, LOG_CHANGES = 7, LOG_ACTIONS = 20, LOG_STEP = 21 };

/* gym_trace/format/ring/log.py: a flag of LOG_START */
enum { START_HAS_INITIAL = 1 };

/* gym_trace/format/ring/memory.py */
enum { SLAB_HEADER = 64 };

/* gym_trace/format/ring/row_slab.py */
enum { RESERVE = 224 };

/* gym_trace/format/ring/lanes/autoreset.py: indices of MODES */
enum { NEXT_STEP = 0, SAME_STEP = 1, DISABLED = 2 };

/* gym_trace/format/ring/log.py: HEADER */
typedef struct {
    uint32_t row;
    uint32_t length;
    uint16_t kind;
    uint16_t flags;
    uint32_t column;
    int64_t a;
    int64_t b;
    int64_t c;
    int64_t d;
    uint64_t mark;
} LogEntry;
_Static_assert(sizeof(LogEntry) == 56, "LogEntry");

/* gym_trace/format/wire.py: FRAGMENT */
typedef struct {
    uint64_t episode;
    uint64_t first_step;
    uint32_t steps;
    uint32_t lane;
    uint32_t flags;
    uint32_t outcome;
    double reward_sum;
    int64_t seed;
    int64_t start_time;
    int64_t clock_offset;
    int64_t duration;
    int64_t clock_drift;
} Fragment;
_Static_assert(sizeof(Fragment) == 80, "Fragment");

/* gym_trace/format/ring/lanes/entries.py: LANE */
typedef struct {
    char open;
    char pending;
    char skipped;
    char running;
    char reserved;
    int64_t episode;
    int64_t steps;
    int64_t utc;
    int64_t monotonic;
    int64_t seed;
} __attribute__((packed)) Lane;
_Static_assert(sizeof(Lane) == 45, "Lane");
