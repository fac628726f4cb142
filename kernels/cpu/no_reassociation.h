/* In a file that includes this header first, the terms of sums are added in the order in which they
   are written. In other files, the compiler may reorder them (compiled_library.FLAGS). With GCC,
   zeros also keep their signs. */

#ifndef BATCHINFER_NO_REASSOCIATION_H
#define BATCHINFER_NO_REASSOCIATION_H

#if defined(__clang__)
#pragma clang fp reassociate(off)
#elif defined(__GNUC__)
#pragma GCC optimize("no-associative-math", "signed-zeros")
#endif

#endif
