/* Writing torch.save zip files: any number of tensors around a pickle that the caller makes. */
#ifndef CKPT_TORCH_WRITE_H
#define CKPT_TORCH_WRITE_H

#include "source.h"
#include "zip.h"

/* The payload of record data/KEY, where KEY counts from 0 in the order of the file, or with `more` a
 * continuation of the record before. */
typedef struct ckpt_pt_payload {
    uint32_t tensor, chunk; /* of the ckpt_out */
    bool more;
    bool copy; /* see ckpt_seg */
} ckpt_pt_payload;

/* Files of a sink whose contents are archives and texts. Calling sequence: begin once, then archive
 * and text for every file in order; the sink is then complete but for manifest_dir. */
typedef struct ckpt_pt_writer {
    ckpt_out *out;
    ckpt_sink *sink;
    size_t max_files;
    struct ckpt_pt_files *files; /* what the literals are made from; in the sink's arena */
} ckpt_pt_writer;

ckpt_status ckpt_pt_begin(ckpt_pt_writer *w, ckpt_out *out, ckpt_sink *sink, size_t max_files,
                          ckpt_err *err) CKPT_MUST_USE;
/* One torch.save file: root "archive"; data.pkl, byteorder, data/0 ..., version, with true CRCs and
 * zip64 where needed. The pickle (whole, 80 02 ... 2e) refers to the tensors by
 * ckpt_zip_put_tensor(key = number of the record). Releases the pickle, copies the payload list, and
 * sets file and offset of every chunk. name: relative to the destination, kept as it is. */
ckpt_status ckpt_pt_archive(ckpt_pt_writer *w, const char *name, ckpt_buf *pickle,
                            const ckpt_pt_payload *payloads, size_t n_payloads,
                            ckpt_err *err) CKPT_MUST_USE;
/* One small file; releases the text. */
ckpt_status ckpt_pt_text(ckpt_pt_writer *w, const char *name, ckpt_buf *text,
                         ckpt_err *err) CKPT_MUST_USE;
/* CKPT_E_UNSUPPORTED if torch.save cannot hold the tensor (chunk c of it). */
ckpt_status ckpt_pt_check(const ckpt_out_tensor *t, const ckpt_out_chunk *c,
                          ckpt_err *err) CKPT_MUST_USE;

/* Optimizer state beside pytorch_model*.bin. */
#define CKPT_PT_OPTIMIZER "optimizer.bin"

/* The container "torch": one file, or a Hugging Face directory of pytorch_model*.bin. */
ckpt_status ckpt_torch_layout(ckpt_out *out, ckpt_sink *sink, ckpt_err *err) CKPT_MUST_USE;

#endif
