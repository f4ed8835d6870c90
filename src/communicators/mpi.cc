#include "zeroone/mpi_communicator.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <new>
#include <string>
#include <thread>

#include "zeroone/error.h"

namespace zeroone {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::align_val_t kAlignment{64};

std::string describe(int code) {
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  if (MPI_Error_string(code, text, &length) != MPI_SUCCESS) return "error " + std::to_string(code);
  return std::string(text, static_cast<std::size_t>(length));
}

// A part of `bytes` bytes as one element: MPI counts in int, and a part may have more than 2^31 bytes.
class Part {
 public:
  explicit Part(std::size_t bytes) {
    constexpr std::size_t kBlock = std::size_t{1} << 30;
    MPI_Datatype block = MPI_DATATYPE_NULL;
    MPI_Type_contiguous(static_cast<int>(kBlock), MPI_BYTE, &block);
    const int lengths[] = {static_cast<int>(bytes / kBlock), static_cast<int>(bytes % kBlock)};
    const MPI_Aint offsets[] = {0, static_cast<MPI_Aint>(bytes - bytes % kBlock)};
    const MPI_Datatype types[] = {block, MPI_BYTE};
    MPI_Type_create_struct(2, lengths, offsets, types, &type_);
    MPI_Type_commit(&type_);
    MPI_Type_free(&block);
  }
  ~Part() { MPI_Type_free(&type_); }  // operations under way keep it
  Part(const Part&) = delete;
  Part& operator=(const Part&) = delete;

  MPI_Datatype type() const { return type_; }

 private:
  MPI_Datatype type_ = MPI_DATATYPE_NULL;
};

// Lets other ranks on this processor work: gives up its turn for the time a short operation takes, then sleeps.
class Backoff {
 public:
  void pause() {
    if (pauses_ < 64) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::min(std::chrono::microseconds(pauses_ / 4), std::chrono::microseconds(100)));
    }
    ++pauses_;
  }

 private:
  std::int64_t pauses_ = 0;
};

}  // namespace

struct MpiCommunicator::Pending {
  struct Operation {
    const char* name = nullptr;
    MPI_Request request = MPI_REQUEST_NULL;
  };

  // Whether MPI has let go of the communicator and of all wire memory.
  bool idle() const { return failure.empty() && operations.empty(); }

  void check() const {
    if (!failure.empty()) throw CommunicationError(failure);
  }

  [[noreturn]] void fail(const char* operation, const std::string& reason) {
    failure = std::string(operation) + place + ": " + reason;
    throw CommunicationError(failure);
  }

  template <typename Call>
  MPI_Request call(const char* operation, Call call) {
    check();
    MPI_Request request = MPI_REQUEST_NULL;
    const int code = call(&request);
    if (code != MPI_SUCCESS) fail(operation, describe(code));
    return request;
  }

  std::string place;  // " on rank 1 of 4"
  std::map<std::int64_t, Operation> operations;

  // The first failure, for good: MPI can't cancel a collective, so it may still write to wire memory, and a later
  // operation would meet one that other ranks have long left.
  std::string failure;
};

MpiCommunicator::MpiCommunicator(MPI_Comm parent, std::chrono::milliseconds timeout)
    : timeout_(timeout), pending_(std::make_unique<Pending>()) {
  int initialized = 0;
  MPI_Initialized(&initialized);
  if (initialized == 0) throw InvalidArgument("MpiCommunicator: MPI is not initialised");
  MPI_Comm_rank(parent, &rank_);
  MPI_Comm_size(parent, &size_);
  pending_->place = " on rank " + std::to_string(rank_) + " of " + std::to_string(size_);

  // MPI_Comm_dup would wait for ever. If the wait fails, `duplicate` is left to MPI, which may still write to it.
  const char* const name = "MPI_Comm_idup";
  auto* const duplicate = new MPI_Comm(MPI_COMM_NULL);
  start(name, pending_->call(name, [&](MPI_Request* request) {
    return MPI_Comm_idup(parent, duplicate, request);
  })).wait();
  communicator_ = *duplicate;
  delete duplicate;
  MPI_Comm_set_errhandler(communicator_, MPI_ERRORS_RETURN);
}

MpiCommunicator::~MpiCommunicator() {
  int finalized = 0;
  MPI_Finalized(&finalized);
  if (finalized == 0 && pending_->idle()) MPI_Comm_free(&communicator_);
}

Buffer MpiCommunicator::allocate(std::size_t bytes) {
  return {next_ticket_++, static_cast<std::byte*>(::operator new(bytes, kAlignment)), bytes};
}

void MpiCommunicator::release(const Buffer& buffer) {
  if (pending_->idle()) ::operator delete(buffer.data, kAlignment);
}

Work MpiCommunicator::all_to_all(const Region& send, const Region& receive, Stream) {
  const auto ranks = static_cast<std::size_t>(size_);
  if (send.bytes != receive.bytes || send.bytes % ranks != 0) {
    throw InvalidArgument("all_to_all: send and receive must be equally many equal parts");
  }
  const char* const name = "MPI_Ialltoall";
  const Part part(send.bytes / ranks);
  return start(name, pending_->call(name, [&](MPI_Request* request) {
    return MPI_Ialltoall(send.data(), 1, part.type(), receive.data(), 1, part.type(), communicator_, request);
  }));
}

Work MpiCommunicator::all_gather(const Region& send, const Region& receive, Stream) {
  if (receive.bytes != send.bytes * static_cast<std::size_t>(size_)) {
    throw InvalidArgument("all_gather: receive must be one part per rank");
  }
  const char* const name = "MPI_Iallgather";
  const Part part(send.bytes);
  return start(name, pending_->call(name, [&](MPI_Request* request) {
    return MPI_Iallgather(send.data(), 1, part.type(), receive.data(), 1, part.type(), communicator_, request);
  }));
}

Work MpiCommunicator::broadcast(const Region& region, int root, Stream) {
  const char* const name = "MPI_Ibcast";
  const Part part(region.bytes);
  return start(name, pending_->call(name, [&](MPI_Request* request) {
    return MPI_Ibcast(region.data(), 1, part.type(), root, communicator_, request);
  }));
}

Work MpiCommunicator::start(const char* operation, MPI_Request request) {
  pending_->operations[next_ticket_] = {operation, request};
  return Work(this, next_ticket_++);
}

void MpiCommunicator::wait(std::int64_t ticket) {
  pending_->check();
  const auto found = pending_->operations.find(ticket);
  if (found == pending_->operations.end()) return;  // waited for before
  auto& [name, request] = found->second;

  const Clock::time_point deadline = Clock::now() + timeout_;
  for (Backoff backoff;; backoff.pause()) {
    int done = 0;
    const int code = MPI_Test(&request, &done, MPI_STATUS_IGNORE);
    if (code != MPI_SUCCESS) pending_->fail(name, describe(code));
    if (done != 0) break;
    if (Clock::now() >= deadline) {
      pending_->fail(name, "not all ranks answered within " + std::to_string(timeout_.count()) + " ms");
    }
  }
  pending_->operations.erase(found);
}

}  // namespace zeroone
