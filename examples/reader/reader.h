#ifndef READER_H
#define READER_H

#include <stdint.h>

#define READER_PIXELS 784      /* 28 rows of 28, 0 is the background and 255 is ink */
#define READER_UNKNOWN (-1)
#define READER_ONE 4096        /* a confidence of 1 */

/* Read a digit: 0 to 9, or READER_UNKNOWN. The confidence is below READER_ONE.
   Integer arithmetic only: every processor gives the same answer. Needs about 4 kB of stack. */
int reader_read(const uint8_t image[READER_PIXELS], uint16_t *confidence);

#endif
