/* In a file that includes this header first, the compiler may neither fuse multiplications with
   additions nor replace divisions with multiplications. Results therefore have the same bits on
   every processor. */

#ifndef BATCHINFER_NO_FMA_CONTRACT_H
#define BATCHINFER_NO_FMA_CONTRACT_H

#if defined(__clang__)
#pragma clang fp contract(off) reciprocal(off)
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off", "no-reciprocal-math")
#endif

#endif
