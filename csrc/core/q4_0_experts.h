// Gated expert FFNs over Q4_0 records; called by run_expert_jobs for jobs of that layout.
#pragma once

#include <span>

#include "expert_kernels.h"

namespace ft::detail {

// See run_expert_jobs. Always deterministic. Jobs' layouts are kQ4_0; routes have been checked.
void run_q4_0_jobs(WorkerPool& pool, std::span<const ExpertJob> jobs, const ExpertBatch& batch);

}  // namespace ft::detail
