/* The digit reader: a convolutional network with 4-bit weights, in integers.

   Every layer is a convolution without padding. Output channel c of a layer is

       y = (sum(w x) * multiplier[c] + bias[c] * 2^(shift - BIAS_BITS)) / 2^shift, cut to 0 ... 255

   with w from -7 to 7 and x from 0 to 255. The last layer keeps its sums: logits in base 2, one for each digit and one
   for images that are no digits. No sum leaves 32 bits: the tool that writes network.h has checked the largest. */

#include "reader.h"

typedef struct {
    uint8_t inputs, input_side, kernel, stride, outputs, output_side, shift;
} layer;

#include "network.h"

/* 2^16 * 2^(-d / 256), by a parabola between whole powers. */
static uint32_t power(uint32_t d)
{
    uint32_t whole = d >> 8, part = d & 255;
    if (whole > 16)
        return 0;
    return (65536 - part * (172 - (part * 44 >> 8))) >> whole;
}

/* Convolve `x` with the weights of one output channel; 4-bit codes go on at code number `at`. */
static void channel(const layer *l, const uint8_t *x, int8_t *weights, uint32_t at, int32_t *sums)
{
    uint32_t side = l->input_side, taps = (uint32_t)l->inputs * l->kernel * l->kernel;
    for (uint32_t i = 0; i < taps; i++, at++)
        weights[i] = (int8_t)((codes[at >> 1] >> (at & 1) * 4 & 15) - 8);
    for (uint32_t row = 0; row < l->output_side; row++)
        for (uint32_t column = 0; column < l->output_side; column++) {
            const uint8_t *from = x + (row * side + column) * l->stride;
            const int8_t *w = weights;
            int32_t sum = 0;
            for (uint32_t c = 0; c < l->inputs; c++, from += side * side)
                for (uint32_t i = 0; i < l->kernel; i++)
                    for (uint32_t j = 0; j < l->kernel; j++)
                        sum += *w++ * from[i * side + j];
            *sums++ = sum;
        }
}

int reader_read(const uint8_t image[READER_PIXELS], uint16_t *confidence)
{
    uint8_t maps[2][MAX_MAP];
    int8_t weights[MAX_TAPS];
    int32_t sums[MAX_AREA], logits[CLASSES];
    const uint8_t *x = image;
    uint32_t at = 0, place = 0;

    for (uint32_t n = 0; n < LAYERS; n++) {
        const layer *l = &layers[n];
        uint32_t area = (uint32_t)l->output_side * l->output_side;
        uint8_t *y = maps[n & 1];
        for (uint32_t c = 0; c < l->outputs; c++, place++) {
            channel(l, x, weights, at, sums);
            at += (uint32_t)l->inputs * l->kernel * l->kernel;
            for (uint32_t i = 0; i < area; i++) {
                int32_t sum = sums[i] * multipliers[place] + biases[place] * (1 << (l->shift - BIAS_BITS));
                if (n == LAYERS - 1)
                    logits[c] = sum;
                else
                    *y++ = sum < 0 ? 0 : sum >> l->shift > 255 ? 255 : (uint8_t)(sum >> l->shift);
            }
        }
        x = maps[n & 1];
    }

    uint32_t digit = 0, total = 0, best;
    int32_t most = logits[DIGITS];
    for (uint32_t c = 0; c < DIGITS; c++) {
        if (logits[c] > logits[digit])
            digit = c;
        if (logits[c] > most)
            most = logits[c];
    }
    for (uint32_t c = 0; c < CLASSES; c++)
        total += power((uint32_t)(most - logits[c]) >> layers[LAYERS - 1].shift);
    best = power((uint32_t)(most - logits[digit]) >> layers[LAYERS - 1].shift);

    /* best / total in 12 bits: long division, as some processors have no divider */
    uint16_t quotient = 0;
    for (int bit = 0; bit < 12; bit++) {
        best <<= 1;
        quotient = (uint16_t)(quotient << 1);
        if (best >= total) {
            best -= total;
            quotient |= 1;
        }
    }
    *confidence = quotient;
    return quotient >= THRESHOLD ? (int)digit : READER_UNKNOWN;
}
