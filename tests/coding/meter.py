"""A coder that only adds up the cost of symbols in bits."""

import math


class Meter:
    def __init__(self):
        self.bits = 0.0

    def symbol(self, value, starts, count):
        self.bits += math.log2(starts(count) / (starts(value + 1) - starts(value)))
        return value

    def bit(self, value, ones, total):
        self.bits += math.log2(total / (ones if value else total - ones))
        return value

    def uniform(self, value, count):
        self.bits += math.log2(count)
        return value
