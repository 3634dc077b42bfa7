// Launchers of the Adam step. Bytes moved a parameter: fp32 28; bf16 with fp32 state and master 28; all bf16 14.
//
// What can be varied to tune the update for a GPU, all below: kThreads and kBlocksPerSM (together the register budget:
// 65536 / (kThreads * kBlocksPerSM) a thread), kUnroll (vectors of every tensor that a thread has in flight), kChunk
// (elements a block; a multiple of 8 * kThreads * kUnroll keeps every full chunk free of idle lanes; larger chunks read
// fewer table entries, smaller ones end together).
#include <algorithm>

#include "adam.cuh"
#include "launch.h"

namespace fusedops::cuda {

namespace {

constexpr int kThreads = 128;
constexpr int kBlocksPerSM = 7;
constexpr int kBlocksPerSMOfAll = 6;  // of the kernel for every rounding
constexpr int kUnroll = 2;
constexpr int kChunk = 8192;
constexpr int kPrologueThreads = 64;
static_assert(kChunk % (8 * kThreads * kUnroll) == 0);

}  // namespace

int64_t adam_chunk_size() { return kChunk; }

const char* adam_step(const AdamTables& tables, const GroupParams* groups, int64_t group_count,
                      const StepInputs& inputs, cudaStream_t stream) {
  if (tables.tensor_count == 0) return nullptr;
  PrologueArgs args;
  args.records = tables.records;
  args.grads = tables.grads;
  args.scalars = tables.scalars;
  args.tensor_count = tables.tensor_count;
  args.inputs = inputs;
  const unsigned blocks = static_cast<unsigned>((tables.tensor_count + kPrologueThreads - 1) / kPrologueThreads);
  for (int64_t first = 0; first < group_count; first += PrologueArgs::kGroups) {
    args.first_group = static_cast<int32_t>(first);
    args.group_count = static_cast<int32_t>(std::min<int64_t>(group_count - first, PrologueArgs::kGroups));
    std::copy_n(groups + first, args.group_count, args.groups);
    const cudaError_t status = launch(adam_prologue_kernel, args, dim3(blocks), dim3(kPrologueThreads), 0, stream);
    if (status != cudaSuccess) return describe(status);
  }
  if (tables.chunk_count == 0) return nullptr;
  const auto kernel = tables.all_roundings ? adam_kernel<true, kThreads, kBlocksPerSMOfAll, kChunk, kUnroll>
                                           : adam_kernel<false, kThreads, kBlocksPerSM, kChunk, kUnroll>;
  return describe(launch(kernel, tables, dim3(static_cast<unsigned>(tables.chunk_count)), dim3(kThreads), 0, stream,
                         /*overlap=*/true));
}

}  // namespace fusedops::cuda
