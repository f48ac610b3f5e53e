/* The table of the plug-in (plugin.h). */
#include "plugin.h"

extern "C" const ckpt_cuda_plugin ckpt_cuda_plugin_v1 = {CKPT_CUDA_PLUGIN_VERSION,
#define X(name) ckpt_cuda_##name,
                                                         CKPT_CUDA_FUNCTIONS(X)
#undef X
};
