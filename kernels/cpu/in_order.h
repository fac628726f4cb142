/* Sums in the file that includes this first stay in the order in which they are written, though the
   library is compiled with that free. With GCC zeros keep their signs there, too. */

#ifndef BATCHINFER_IN_ORDER_H
#define BATCHINFER_IN_ORDER_H

#if defined(__clang__)
#pragma clang fp reassociate(off)
#elif defined(__GNUC__)
#pragma GCC optimize("no-associative-math", "signed-zeros")
#endif

#endif
