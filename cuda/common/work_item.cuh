// What the planner (plan_decode.cu) tells the decode kernel (paged_decode.cu). Laid out as in
// engine/ops/plan_decode.py.
#pragma once

struct alignas(16) WorkItem {
  int row;         // of the batch
  int table_row;   // of the block table
  int begin, end;  // tokens to attend to
  int part;        // where the part's result goes, or -1: the row is in one item, write the final result
  int first_part;  // of the row
  int num_parts;   // of the row
  int split;       // number of the row among those in several parts
};

constexpr int MAX_PARTS = 288;  // of one row
