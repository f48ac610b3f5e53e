/* Which of a group's layouts a model is converted to. */
#include "model.h"

#include <string.h>

/* Tensors that a layout has a row for: how much of a model it could hold. */
static size_t tensors_held(const ckpt_layout *layout, const ckpt_model *model)
{
    size_t held = 0;
    for (size_t i = 0; i < model->n_tensors; i++)
        for (size_t r = 0; r < layout->n_rows; r++) {
            ckpt_index at;
            if (ckpt_pattern_match(layout->rows[r].canon, model->tensors[i].name, &model->syms,
                                   &at)) {
                held++;
                break;
            }
        }
    return held;
}

const ckpt_layout *ckpt_layout_for(const ckpt_model *model, const ckpt_json *foreign,
                                   const ckpt_mesh *mesh, const char *group)
{
    const ckpt_layout *nearest = NULL, *fits = NULL;
    bool fits_well = false;
    size_t most = 0;
    for (size_t i = 0; ckpt_layouts[i] != NULL; i++) {
        const ckpt_layout *l = ckpt_layouts[i];
        ckpt_json *config = NULL;
        if (strcmp(l->group, group) != 0 || strcmp(l->family, model->layout->family) != 0)
            continue;
        bool claimed = foreign != NULL && l->claims != NULL && l->claims(foreign) > 0;
        bool usual = l->usual == NULL || l->usual(model->config);
        size_t held = claimed ? SIZE_MAX : fits == NULL ? tensors_held(l, model) : 0;
        if (nearest == NULL || held > most) {
            nearest = l;
            most = held;
        }
        if (fits != NULL && !claimed && (fits_well || !usual))
            continue;
        ckpt_status status = l->config_write == NULL
                                 ? CKPT_OK
                                 : l->config_write(model->config, foreign, mesh, &config, NULL);
        ckpt_json_free(config);
        if (status == CKPT_OK && claimed)
            return l;
        if (status == CKPT_OK) {
            fits = l;
            fits_well = usual;
        }
    }
    return fits != NULL ? fits : nearest;
}
