// Compiles and links against zeroone::mpi; the tests run MPI elsewhere.
#include <zeroone/mpi_communicator.h>

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  { zeroone::MpiCommunicator communicator(MPI_COMM_WORLD); }
  MPI_Finalize();
}
