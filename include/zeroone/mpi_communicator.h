// Ranks of an MPI communicator. Link zeroone::mpi.
#pragma once

#include <mpi.h>

#include <chrono>
#include <map>
#include <memory>

#include "zeroone/communicator.h"

namespace zeroone {

/// Talks over a private duplicate of `parent`, which is made here: the constructor is a collective. MPI must be
/// initialised before and finalised after this object's life, with MPI_THREAD_SERIALIZED if the caller's thread
/// changes. A rank that does not answer within `timeout` makes the others throw CommunicationError.
class MpiCommunicator : public Communicator {
 public:
  explicit MpiCommunicator(MPI_Comm parent, std::chrono::milliseconds timeout = std::chrono::minutes(10));
  ~MpiCommunicator() override;
  MpiCommunicator(const MpiCommunicator&) = delete;
  MpiCommunicator& operator=(const MpiCommunicator&) = delete;

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  Buffer allocate(std::size_t bytes) override;
  void release(const Buffer& buffer) override;
  Work all_to_all(const Region& send, const Region& receive, Stream stream) override;
  Work all_gather(const Region& send, const Region& receive, Stream stream) override;
  Work broadcast(const Region& region, int root, Stream stream) override;
  void wait(std::int64_t ticket) override;

 private:
  struct Pending;

  Work start(const char* operation, MPI_Request request);

  MPI_Comm communicator_ = MPI_COMM_NULL;
  std::chrono::milliseconds timeout_;
  int rank_ = 0;
  int size_ = 1;
  std::int64_t next_ticket_ = 1;
  std::unique_ptr<Pending> pending_;
};

}  // namespace zeroone
