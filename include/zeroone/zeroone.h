// Everything that needs no MPI.
#pragma once

#include "zeroone/code.h"
#include "zeroone/collective.h"
#include "zeroone/communicator.h"
#include "zeroone/engine.h"
#include "zeroone/error.h"
#include "zeroone/instruction_set.h"
#include "zeroone/one_bit_all_reduce.h"
#include "zeroone/optimizer.h"
#include "zeroone/preconditioner.h"
#include "zeroone/recipe.h"
#include "zeroone/schedule.h"
#include "zeroone/state_memory.h"
#include "zeroone/thread_communicator.h"
#include "zeroone/types.h"
