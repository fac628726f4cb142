/* In the file that includes this first products are rounded before anything is added to them, and a
   division is one: bits are the same on every processor. */

#ifndef BATCHINFER_NO_FMA_CONTRACT_H
#define BATCHINFER_NO_FMA_CONTRACT_H

#if defined(__clang__)
#pragma clang fp contract(off) reciprocal(off)
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off", "no-reciprocal-math")
#endif

#endif
