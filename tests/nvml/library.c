/* A libnvidia-ml.so.1 for tests: answers NVML's C interface from a file that a test writes, named by NVML_HOST_FILE.
 *
 * The file is read again at each call, so that a test can lose a GPU and bring it back. A line is one device:
 *
 *   gpu index=0 uuid=GPU-a name=NVIDIA_L4 total=24e9 used=1e9 use=97 power=70000 temp=60 clock=2000 reasons=0
 *   mig of=0 number=2 uuid=MIG-b total=9e9 used=1e9 use=!3 power=!3
 *   process of=GPU-a pid=4711 used=9e9
 *   init=!9
 *
 * A figure is a number, or `!n` for NVML's error n: 3 not supported, 15 GPU is lost, 16 reset required. `all=!15` is
 * what every call on the device answers. Layouts and numbers are those of nvml.h of CUDA 13. With -DOLD_DRIVER it is a
 * driver from before 535, which knows the reasons for slow clocks under their older name alone.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6,
       INSUFFICIENT_SIZE = 7, ARGUMENT_VERSION_MISMATCH = 25 };
enum { MOST = 16, VALUE_ABSENT = -1, FIELDS = 20 };
#define MEMORY_V2 0x02000028u /* sizeof(nvmlMemory_v2_t) | 2 << 24 */

typedef struct { unsigned long long total, free, used; } memory_v1;
typedef struct { unsigned int version; unsigned long long total, reserved, free, used; } memory_v2;
typedef struct { unsigned int gpu, memory; } utilization;
typedef struct { unsigned int pid; unsigned long long used; unsigned int gpu_instance, compute_instance; } process;
_Static_assert(sizeof(memory_v2) == 0x28 && sizeof(process) == 24, "layout of nvml.h");

typedef struct { char kind[12]; int n; char key[FIELDS][16], value[FIELDS][80]; } line;
static line lines[MOST];
static int count, sessions;

static const char *get(const line *l, const char *key) {
    for (int i = 0; i < l->n; i++)
        if (!strcmp(l->key[i], key)) return l->value[i];
    return NULL;
}

static void load(void) {
    char text[1024], *save, *word;
    FILE *f = fopen(getenv("NVML_HOST_FILE") ? getenv("NVML_HOST_FILE") : "", "r");
    count = 0;
    while (f && count < MOST && fgets(text, sizeof text, f)) {
        line *l = &lines[count];
        memset(l, 0, sizeof *l);
        for (word = strtok_r(text, " \n", &save); word; word = strtok_r(NULL, " \n", &save)) {
            char *eq = strchr(word, '=');
            if (!eq && !l->kind[0]) { snprintf(l->kind, sizeof l->kind, "%s", word); continue; }
            if (!eq || l->n >= FIELDS) continue;
            *eq = 0;
            snprintf(l->key[l->n], sizeof l->key[0], "%s", word);
            snprintf(l->value[l->n++], sizeof l->value[0], "%s", eq + 1);
        }
        count++;
    }
    if (f) fclose(f);
}

/* What a device says of itself: SUCCESS and its number, or an error. */
static int figure(void *handle, const char *key, double *out) {
    if (!sessions) return UNINITIALIZED;
    load();
    long at = (long)handle - 1;
    if (at < 0 || at >= count) return INVALID_ARGUMENT;
    const char *all = get(&lines[at], "all"), *value = get(&lines[at], key);
    if (all && *all == '!') return atoi(all + 1);
    if (!value) return NOT_SUPPORTED;
    if (*value == '!') return atoi(value + 1);
    *out = atof(value);
    return SUCCESS;
}

static int number(void *handle, const char *key, unsigned int *out) {
    double found = 0;
    int failed = figure(handle, key, &found);
    if (!failed) *out = (unsigned int)found;
    return failed;
}

static int wide(void *handle, const char *key, unsigned long long *out) {
    double found = 0;
    int failed = figure(handle, key, &found);
    if (!failed) *out = (unsigned long long)found;
    return failed;
}

static int text(void *handle, const char *key, char *out, unsigned int size) {
    double ignored;
    int failed = figure(handle, key, &ignored);
    if (failed) return failed;
    snprintf(out, size, "%s", get(&lines[(long)handle - 1], key));
    for (char *c = out; *c; c++) if (*c == '_') *c = ' ';
    return SUCCESS;
}

static int find(const char *kind, const char *key, const char *value, const char *key2, const char *value2, void **out) {
    if (!sessions) return UNINITIALIZED;
    load();
    for (long i = 0; i < count; i++) {
        const char *one = get(&lines[i], key), *two = key2 ? get(&lines[i], key2) : NULL;
        if ((kind && strcmp(lines[i].kind, kind)) || !one || strcmp(one, value)) continue;
        if (key2 && (!two || strcmp(two, value2))) continue;
        const char *all = get(&lines[i], "all");
        if (all && *all == '!') return atoi(all + 1);
        *out = (void *)(i + 1);
        return SUCCESS;
    }
    return NOT_FOUND;
}

int nvmlInitWithFlags(unsigned int flags) {
    (void)flags;
    load();
    for (int i = 0; i < count; i++) {
        const char *init = get(&lines[i], "init");
        if (init && *init == '!') return atoi(init + 1);
    }
    sessions++;
    return SUCCESS;
}
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { return sessions ? (sessions--, SUCCESS) : UNINITIALIZED; }

const char *nvmlErrorString(int error) {
    switch (error) {
    case 3: return "Not Supported";
    case 6: return "Not Found";
    case 9: return "Driver Not Loaded";
    case 10: return "Timeout";
    case 15: return "GPU is lost";
    case 16: return "GPU requires reset";
    case 18: return "Driver/library version mismatch";
    default: return "Unknown Error";
    }
}

int nvmlSystemGetDriverVersion(char *out, unsigned int size) { snprintf(out, size, "580.159.03"); return SUCCESS; }
int nvmlSystemGetCudaDriverVersion_v2(int *out) { *out = 13000; return SUCCESS; }

int nvmlDeviceGetCount_v2(unsigned int *out) {
    if (!sessions) return UNINITIALIZED;
    load();
    *out = 0;
    for (int i = 0; i < count; i++) *out += !strcmp(lines[i].kind, "gpu");
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **out) {
    char wanted[12];
    snprintf(wanted, sizeof wanted, "%u", index);
    return find("gpu", "index", wanted, NULL, NULL, out) == NOT_FOUND ? INVALID_ARGUMENT
                                                                        : find("gpu", "index", wanted, NULL, NULL, out);
}
int nvmlDeviceGetHandleByUUID(const char *uuid, void **out) { return find(NULL, "uuid", uuid, NULL, NULL, out); }
int nvmlDeviceGetIndex(void *h, unsigned int *out) { return number(h, "index", out); }
int nvmlDeviceGetName(void *h, char *out, unsigned int size) { return text(h, "name", out, size); }
int nvmlDeviceGetUUID(void *h, char *out, unsigned int size) { return text(h, "uuid", out, size); }

int nvmlDeviceGetMemoryInfo(void *h, memory_v1 *out) {
    int failed = wide(h, "total", &out->total);
    if (!failed) failed = wide(h, "used", &out->used);
    if (!failed) out->free = out->total - out->used;
    return failed;
}
int nvmlDeviceGetMemoryInfo_v2(void *h, memory_v2 *out) {
    if (out->version != MEMORY_V2) return ARGUMENT_VERSION_MISMATCH;
    memory_v1 old = {0, 0, 0};
    int failed = nvmlDeviceGetMemoryInfo(h, &old);
    out->total = old.total, out->free = old.free, out->used = old.used, out->reserved = 0;
    return failed;
}
int nvmlDeviceGetUtilizationRates(void *h, utilization *out) { out->memory = 0; return number(h, "use", &out->gpu); }
int nvmlDeviceGetPowerUsage(void *h, unsigned int *out) { return number(h, "power", out); }
int nvmlDeviceGetTemperature(void *h, int sensor, unsigned int *out) {
    return sensor == 0 ? number(h, "temp", out) : INVALID_ARGUMENT;
}
int nvmlDeviceGetClockInfo(void *h, int kind, unsigned int *out) {
    return kind == 1 ? number(h, "clock", out) : INVALID_ARGUMENT; /* NVML_CLOCK_SM */
}
int nvmlDeviceGetCurrentClocksThrottleReasons(void *h, unsigned long long *out) { return wide(h, "reasons", out); }
#ifndef OLD_DRIVER
int nvmlDeviceGetCurrentClocksEventReasons(void *h, unsigned long long *out) { return wide(h, "reasons", out); }
#endif

int nvmlDeviceGetMaxMigDeviceCount(void *h, unsigned int *out) {
    double ignored;
    int failed = figure(h, "index", &ignored);
    *out = 7;
    return failed;
}
int nvmlDeviceGetMigMode(void *h, unsigned int *now, unsigned int *pending) {
    void *part;
    char index[12];
    unsigned int of;
    int failed = number(h, "index", &of);
    if (failed) return failed;
    snprintf(index, sizeof index, "%u", of);
    *now = *pending = find("mig", "of", index, NULL, NULL, &part) == SUCCESS;
    return SUCCESS;
}
int nvmlDeviceGetMigDeviceHandleByIndex(void *h, unsigned int which, void **out) {
    char index[12], wanted[12];
    unsigned int of;
    int failed = number(h, "index", &of);
    if (failed) return failed;
    snprintf(index, sizeof index, "%u", of);
    snprintf(wanted, sizeof wanted, "%u", which);
    return find("mig", "of", index, "number", wanted, out);
}
int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(void *h, void **out) {
    char index[12];
    unsigned int of;
    int failed = number(h, "of", &of);
    if (failed) return failed;
    snprintf(index, sizeof index, "%u", of);
    return find("gpu", "index", index, NULL, NULL, out);
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *h, unsigned int *n, process *out) {
    char uuid[80];
    unsigned int room = *n, found = 0;
    int failed = text(h, "uuid", uuid, sizeof uuid);
    if (failed) return failed;
    for (int i = 0; i < count; i++) {
        if (strcmp(lines[i].kind, "process") || strcmp(get(&lines[i], "of"), uuid)) continue;
        const char *used = get(&lines[i], "used");
        if (found < room && out)
            out[found] = (process){(unsigned)atoi(get(&lines[i], "pid")), used ? (unsigned long long)atof(used) : ~0ull,
                                   ~0u, ~0u};
        found++;
    }
    *n = found;
    return found > room || (found && !out) ? INSUFFICIENT_SIZE : SUCCESS;
}
