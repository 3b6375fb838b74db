"""A rank that takes memory until somebody stops it."""

import time

taken = []
while True:
    taken.append(bytearray(8 << 20))
    time.sleep(0.005)
