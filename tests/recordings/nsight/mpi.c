/* Communicates between two MPI ranks, with NVTX ranges for steps; recorded by nsys. Built by mpicc. */
#include <fcntl.h>
#include <mpi.h>
#include <nvtx3/nvToolsExt.h>
#include <stdio.h>
#include <unistd.h>

enum { STEPS = 3, HALF = 1 << 10, WHOLE = 1 << 11 };
static double half[HALF], whole[WHOLE], other_half[HALF], other_whole[WHOLE];

int main(int argc, char **argv) {
  int rank, count;
  char name[64];
  MPI_Comm own;
  MPI_Request requests[2];
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &count);
  MPI_Comm_split(MPI_COMM_WORLD, rank, 0, &own);
  int other = 1 - rank;
  for (int step = 0; step < STEPS; step++) {
    snprintf(name, sizeof name, "step %d", step);
    nvtxRangePushA(name);
    nvtxRangePushA("forward");
    MPI_Bcast(whole, WHOLE, MPI_DOUBLE, 0, MPI_COMM_WORLD);
    MPI_Allgather(half, HALF, MPI_DOUBLE, other_whole, HALF, MPI_DOUBLE, MPI_COMM_WORLD);
    nvtxRangePop();
    nvtxRangePushA("backward");
    MPI_Allreduce(whole, other_whole, WHOLE, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
    MPI_Reduce_scatter_block(whole, half, HALF, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
    MPI_Alltoall(whole, HALF, MPI_DOUBLE, other_whole, HALF, MPI_DOUBLE, MPI_COMM_WORLD);
    nvtxRangePop();
    nvtxRangePushA("exchange");
    MPI_Irecv(other_half, HALF, MPI_DOUBLE, other, 7, MPI_COMM_WORLD, &requests[0]);
    MPI_Isend(half, HALF, MPI_DOUBLE, other, 7, MPI_COMM_WORLD, &requests[1]);
    MPI_Waitall(2, requests, MPI_STATUSES_IGNORE);
    if (rank == 0)
      MPI_Send(whole, WHOLE, MPI_DOUBLE, other, 9, MPI_COMM_WORLD);
    else
      MPI_Recv(whole, WHOLE, MPI_DOUBLE, other, 9, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    nvtxRangePop();
    nvtxRangePushA("save");
    MPI_Barrier(own);
    snprintf(name, sizeof name, "part-of-rank-%d", rank);
    int file = open(name, O_CREAT | O_WRONLY, 0600);
    count = (int)pwrite(file, whole, sizeof whole, 0);
    fsync(file);
    close(file);
    MPI_Barrier(MPI_COMM_WORLD);
    nvtxRangePop();
    nvtxRangePop();
  }
  MPI_Finalize();
  return count <= 0;
}
