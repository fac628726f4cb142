/* In a file that includes this header first, the compiler adds the terms of sums in the order of
   the code. In other files, the compiler may reorder terms (compiled_library.FLAGS). With GCC,
   zeros also keep their signs. */

#ifndef BATCHINFER_NO_REASSOCIATION_H
#define BATCHINFER_NO_REASSOCIATION_H

#if defined(__clang__)
#pragma clang fp reassociate(off)
#elif defined(__GNUC__)
#pragma GCC optimize("no-associative-math", "signed-zeros")
#endif

#endif
