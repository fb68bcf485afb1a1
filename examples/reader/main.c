/* Read images of 784 bytes from standard input; write "digit confidence" for each, a line each. */

#include <stdio.h>

#include "reader.h"

int main(void)
{
    static uint8_t image[READER_PIXELS];
    while (fread(image, 1, sizeof image, stdin) == sizeof image) {
        uint16_t confidence;
        int digit = reader_read(image, &confidence);
        printf("%d %d\n", digit, confidence);
    }
    return 0;
}
