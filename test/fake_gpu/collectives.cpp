// NCCL among the ranks of one machine: real copies and sums through shared memory. A call is done when it returns.
// A rank writes what it gives into a file of its own in /dev/shm. All wait, read, and wait again.
#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "nccl.h"

namespace {
const int MAX_RANKS = 64;
const int LIMIT = 60;  // seconds to wait for a rank

struct Shared {
    std::atomic<int> arrived, round;
    std::atomic<size_t> bytes[MAX_RANKS];
};

struct File {
    char *place = nullptr;
    size_t bytes = 0;
};

struct Comm {
    std::string name;
    int rank, size, splits = 0;
    Shared *shared;
    File files[MAX_RANKS];
    std::map<int, long> sent, received;  // how many messages to, and from, a rank

    std::string path(const std::string &end) const { return "/dev/shm/fakenccl-" + name + "-" + end; }
};

void *mapped(const std::string &path, size_t bytes, bool grow) {
    int file = open(path.c_str(), O_RDWR | O_CREAT, 0600);
    struct stat found;
    if (file < 0 || fstat(file, &found)) return nullptr;
    if (grow && (size_t)found.st_size < bytes && ftruncate(file, bytes)) return nullptr;
    void *place = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    return place == MAP_FAILED ? nullptr : place;
}

bool waits_for(const std::function<bool()> &ready) {
    auto end = std::chrono::steady_clock::now() + std::chrono::seconds(LIMIT);
    for (int turn = 0; !ready(); turn++) {
        if (turn < 100)
            sched_yield();
        else
            usleep(200);
        if (std::chrono::steady_clock::now() > end) return false;
    }
    return true;
}

bool barrier(Comm *comm) {
    int round = comm->shared->round;
    if (comm->shared->arrived.fetch_add(1) + 1 == comm->size) {
        comm->shared->arrived = 0;
        comm->shared->round++;
        return true;
    }
    return waits_for([&] { return comm->shared->round != round; });
}

// what a rank gave, at least `bytes` of it
char *file_of(Comm *comm, int rank, size_t bytes) {
    File &file = comm->files[rank];
    if (file.bytes < bytes) {
        if (file.place) munmap(file.place, file.bytes);
        file.bytes = (bytes + 4095) & ~size_t(4095);
        file.place = (char *)mapped(comm->path(std::to_string(rank)), file.bytes, rank == comm->rank);
    }
    return file.place;
}

// all ranks give `bytes` from `from`; then `read` may look at what each gave
ncclResult_t exchange(Comm *comm, const void *from, size_t bytes, const std::function<void(const std::function<char *(int)> &)> &read) {
    if (bytes) {
        char *own = file_of(comm, comm->rank, bytes);
        if (!own) return ncclSystemError;
        memcpy(own, from, bytes);
    }
    if (!barrier(comm)) return ncclSystemError;
    read([&](int rank) { return file_of(comm, rank, bytes); });
    return barrier(comm) ? ncclSuccess : ncclSystemError;
}

size_t size_of(ncclDataType_t type) {
    switch (type) {
        case ncclInt8: case ncclUint8: case ncclFloat8e4m3: case ncclFloat8e5m2: return 1;
        case ncclFloat16: case ncclBfloat16: return 2;
        case ncclInt64: case ncclUint64: case ncclFloat64: return 8;
        default: return 4;
    }
}

struct Bfloat16 {
    uint16_t bits;
    Bfloat16(float value) {
        uint32_t word;
        memcpy(&word, &value, 4);
        bits = (word + 0x7fff + ((word >> 16) & 1)) >> 16;
    }
    operator float() const {
        uint32_t word = uint32_t(bits) << 16;
        float value;
        memcpy(&value, &word, 4);
        return value;
    }
};

template <class T, class Wide>
void reduce(T *to, const T *from, size_t count, int operation) {
    for (size_t i = 0; i < count; i++) {
        Wide a = to[i], b = from[i];
        to[i] = T(operation == ncclProd ? a * b : operation == ncclMax ? std::max(a, b) : operation == ncclMin ? std::min(a, b) : a + b);
    }
}

template <class T>
void divide(T *to, size_t count, int by) {
    for (size_t i = 0; i < count; i++) to[i] = T(to[i] / by);
}

void reduce(char *to, const char *from, size_t count, ncclDataType_t type, int operation) {
    switch (type) {
        case ncclInt8: return reduce<int8_t, int>((int8_t *)to, (const int8_t *)from, count, operation);
        case ncclUint8: return reduce<uint8_t, int>((uint8_t *)to, (const uint8_t *)from, count, operation);
        case ncclInt32: return reduce<int32_t, int64_t>((int32_t *)to, (const int32_t *)from, count, operation);
        case ncclInt64: return reduce<int64_t, int64_t>((int64_t *)to, (const int64_t *)from, count, operation);
        case ncclFloat16: return reduce<_Float16, float>((_Float16 *)to, (const _Float16 *)from, count, operation);
        case ncclBfloat16: return reduce<Bfloat16, float>((Bfloat16 *)to, (const Bfloat16 *)from, count, operation);
        case ncclFloat64: return reduce<double, double>((double *)to, (const double *)from, count, operation);
        default: return reduce<float, float>((float *)to, (const float *)from, count, operation);
    }
}

void average(char *to, size_t count, ncclDataType_t type, int by) {
    switch (type) {
        case ncclFloat16: return divide((_Float16 *)to, count, by);
        case ncclBfloat16: for (size_t i = 0; i < count; i++) ((Bfloat16 *)to)[i] = Bfloat16(((Bfloat16 *)to)[i] / by); return;
        case ncclFloat64: return divide((double *)to, count, by);
        default: return divide((float *)to, count, by);
    }
}

// `count` elements from `start` of what all ranks gave, reduced in the order of ranks
void reduced(Comm *comm, const std::function<char *(int)> &given, void *to, size_t start, size_t count, ncclDataType_t type, int operation) {
    size_t width = size_of(type);
    memcpy(to, given(0) + start * width, count * width);
    for (int rank = 1; rank < comm->size; rank++) reduce((char *)to, given(rank) + start * width, count, type, operation);
    if (operation == ncclAvg) average((char *)to, count, type, comm->size);
}

// groups: sends first, because they never wait
thread_local int depth = 0;
thread_local std::vector<std::pair<bool, std::function<ncclResult_t()>>> calls;

ncclResult_t run(bool send, std::function<ncclResult_t()> call) {
    if (!depth) return call();
    calls.push_back({send, std::move(call)});
    return ncclSuccess;
}

ncclResult_t join(ncclComm_t *found, const std::string &name, int rank, int size) {
    if (size > MAX_RANKS) return ncclInvalidArgument;
    Comm *comm = new Comm{name, rank, size};
    comm->shared = (Shared *)mapped(comm->path("all"), sizeof(Shared), true);
    *found = (ncclComm_t)comm;
    return comm->shared && barrier(comm) ? ncclSuccess : ncclSystemError;
}

Comm *of(ncclComm_t comm) { return (Comm *)comm; }
}  // namespace

extern "C" {
ncclResult_t ncclGetVersion(int *version) {
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}
const char *ncclGetErrorString(ncclResult_t) { return "a rank did not come within 60 s"; }
const char *ncclGetLastError(ncclComm_t) { return ""; }
ncclResult_t ncclGetUniqueId(ncclUniqueId *id) { return getrandom(id, sizeof *id, 0) == sizeof *id ? ncclSuccess : ncclSystemError; }

ncclResult_t ncclCommInitRank(ncclComm_t *comm, int size, ncclUniqueId id, int rank) {
    std::string name;
    char text[3];
    for (int i = 0; i < 16; i++) snprintf(text, 3, "%02x", (unsigned char)id.internal[i]), name += text;
    return join(comm, name, rank, size);
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int size, ncclUniqueId id, int rank, ncclConfig_t *) {
    return ncclCommInitRank(comm, size, id, rank);
}
ncclResult_t ncclCommInitRankScalable(ncclComm_t *comm, int size, int rank, int, ncclUniqueId *ids, ncclConfig_t *) {
    return ncclCommInitRank(comm, size, ids[0], rank);
}
ncclResult_t ncclCommSplit(ncclComm_t parent, int color, int key, ncclComm_t *comm, ncclConfig_t *) {
    Comm *all = of(parent);
    std::vector<std::tuple<int, int>> members;  // (key, rank)
    int own[2] = {color, key};
    ncclResult_t result = exchange(all, own, sizeof own, [&](auto given) {
        for (int rank = 0; rank < all->size; rank++) {
            int *other = (int *)given(rank);
            if (other[0] == color) members.push_back({other[1], rank});
        }
    });
    std::string name = all->name + "." + std::to_string(all->splits++) + "." + std::to_string(color);
    *comm = nullptr;
    if (result != ncclSuccess || color < 0) return result;
    std::sort(members.begin(), members.end());
    int rank = std::find(members.begin(), members.end(), std::tuple<int, int>{key, all->rank}) - members.begin();
    return join(comm, name, rank, members.size());
}
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    if (!comm) return ncclSuccess;
    unlink(of(comm)->path(std::to_string(of(comm)->rank)).c_str());
    unlink(of(comm)->path("all").c_str());
    return ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t comm) { return ncclCommDestroy(comm); }
ncclResult_t ncclCommCount(ncclComm_t comm, int *count) {
    *count = of(comm)->size;
    return ncclSuccess;
}
ncclResult_t ncclCommUserRank(ncclComm_t comm, int *rank) {
    *rank = of(comm)->rank;
    return ncclSuccess;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t *error) {
    *error = ncclSuccess;
    return ncclSuccess;
}
ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t *operation, void *, ncclDataType_t, ncclScalarResidence_t, ncclComm_t) {
    *operation = ncclSum;  // the factor is lost
    return ncclSuccess;
}

ncclResult_t ncclGroupStart() {
    depth++;
    return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
    if (--depth) return ncclSuccess;
    auto now = std::move(calls);
    calls.clear();
    for (bool send : {true, false})
        for (auto &call : now)
            if (call.first == send)
                if (ncclResult_t result = call.second()) return result;
    return ncclSuccess;
}

ncclResult_t ncclAllReduce(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t operation, ncclComm_t comm, cudaStream_t) {
    return run(false, [=] {
        return exchange(of(comm), from, count * size_of(type), [=](auto given) { reduced(of(comm), given, to, 0, count, type, operation); });
    });
}
ncclResult_t ncclReduce(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t operation, int root, ncclComm_t comm, cudaStream_t) {
    return run(false, [=] {
        return exchange(of(comm), from, count * size_of(type), [=](auto given) {
            if (of(comm)->rank == root) reduced(of(comm), given, to, 0, count, type, operation);
        });
    });
}
ncclResult_t ncclReduceScatter(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t operation, ncclComm_t comm, cudaStream_t) {
    return run(false, [=] {
        size_t bytes = count * of(comm)->size * size_of(type);
        return exchange(of(comm), from, bytes, [=](auto given) { reduced(of(comm), given, to, count * of(comm)->rank, count, type, operation); });
    });
}
ncclResult_t ncclAllGather(const void *from, void *to, size_t count, ncclDataType_t type, ncclComm_t comm, cudaStream_t) {
    return run(false, [=] {
        size_t bytes = count * size_of(type);
        return exchange(of(comm), from, bytes, [=](auto given) {
            for (int rank = 0; rank < of(comm)->size && bytes; rank++) memcpy((char *)to + rank * bytes, given(rank), bytes);
        });
    });
}
ncclResult_t ncclBroadcast(const void *from, void *to, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t) {
    return run(false, [=] {
        Comm *all = of(comm);
        size_t bytes = count * size_of(type);
        bool gives = all->rank == root;
        if (gives && bytes) memcpy(file_of(all, root, bytes), from, bytes);
        if (!barrier(all)) return ncclSystemError;
        if (bytes) memcpy(to, file_of(all, root, bytes), bytes);
        return barrier(all) ? ncclSuccess : ncclSystemError;
    });
}
ncclResult_t ncclBcast(void *place, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
    return ncclBroadcast(place, place, count, type, root, comm, stream);
}
ncclResult_t ncclAlltoAll(const void *from, void *to, size_t count, ncclDataType_t type, ncclComm_t comm, cudaStream_t) {
    return run(false, [=] {
        Comm *all = of(comm);
        size_t bytes = count * size_of(type);
        return exchange(all, from, bytes * all->size, [=](auto given) {
            for (int rank = 0; rank < all->size && bytes; rank++) memcpy((char *)to + rank * bytes, given(rank) + all->rank * bytes, bytes);
        });
    });
}

// a message is a file that appears whole
ncclResult_t ncclSend(const void *from, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t) {
    return run(true, [=] {
        Comm *all = of(comm);
        std::string path = all->path(std::to_string(all->rank) + "to" + std::to_string(peer) + "." + std::to_string(all->sent[peer]++));
        FILE *file = fopen((path + "~").c_str(), "wb");
        if (!file) return ncclSystemError;
        bool whole = fwrite(from, 1, count * size_of(type), file) == count * size_of(type);
        return !fclose(file) && whole && !rename((path + "~").c_str(), path.c_str()) ? ncclSuccess : ncclSystemError;
    });
}
ncclResult_t ncclRecv(void *to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t) {
    return run(false, [=] {
        Comm *all = of(comm);
        std::string path = all->path(std::to_string(peer) + "to" + std::to_string(all->rank) + "." + std::to_string(all->received[peer]++));
        FILE *file = nullptr;
        if (!waits_for([&] { return (file = fopen(path.c_str(), "rb")); })) return ncclSystemError;
        bool whole = fread(to, 1, count * size_of(type), file) == count * size_of(type);
        fclose(file);
        unlink(path.c_str());
        return whole ? ncclSuccess : ncclInvalidUsage;
    });
}
}
