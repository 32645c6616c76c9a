import unittest

from booking import free, merge, overlaps, parse, price


class Booking(unittest.TestCase):
    def test_ranges_that_only_touch_do_not_overlap(self):
        self.assertFalse(overlaps((0, 60), (60, 120)))
        self.assertTrue(overlaps((0, 61), (60, 120)))

    def test_merge_joins_what_overlaps(self):
        self.assertEqual(merge([(30, 90), (0, 60)]), [(0, 90)])
        self.assertEqual(merge([(0, 100), (10, 20)]), [(0, 100)])

    def test_free_time_between_bookings(self):
        self.assertEqual(free((480, 1080), [(540, 600), (660, 720)]), [(480, 540), (600, 660), (720, 1080)])

    def test_parse(self):
        self.assertEqual(parse("09:30-11:00"), (570, 660))
        self.assertEqual(parse("22:00-02:00"), (1320, 1560))

    def test_price_by_day(self):
        self.assertEqual(price((600, 660), 1200), 1200)


if __name__ == "__main__":
    unittest.main()
