// From a matrix as a file has it to the panels that the kernels read; program.h draws both the planes and the records.
#pragma once
#include "program.h"

namespace octavo {

struct PackJob {
  WeightType type;
  int n, k;
  const std::byte *rows;  // the file's rows, one after the other
  std::byte *to;          // panels, zeros before
};

// Bytes of a row of k inputs in the file. Throws std::invalid_argument if they are not whole blocks.
int64_t file_row_bytes(WeightType type, int64_t k);

// Packs rows [16 * panel, 16 * panel + 16) of the job's matrix.
void pack_panel(const PackJob &job, int panel);

}  // namespace octavo
