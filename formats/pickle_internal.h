/* Shared by the pickle_*.c files only. */
#ifndef CKPT_PICKLE_INTERNAL_H
#define CKPT_PICKLE_INTERNAL_H

#include "pickle.h"

#include <stdio.h>

/* Is module.name one of the inert classes that checkpoints are made of? */
bool ckpt_pkl_global_known(const char *module, const char *name);

#endif
