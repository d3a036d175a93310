// Whether copying a record for a later layer, ahead of time, pays.
#pragma once

#include <algorithm>
#include <vector>

namespace ft {

// What a missing record costs each party beside the other, nanoseconds; 0: not known.
struct RecordCosts {
  double fetch_ns = 0.0;
  double cpu_ns = 0.0;
};

// A right guess saves a layer its share of what one record costs bus and CPU together. A wrong one costs the time by
// which the copy outlasts the bus's pause between two layers. So a copy is made where the guesses of that layer are
// right often enough for that, and for kLeastAccuracy: below it most of what crosses the bus would be thrown away.
// Guesses are judged whether a copy is made or not, so a layer comes back by itself. Not thread-safe.
class Lookahead {
 public:
  static constexpr double kLeastAccuracy = 0.5;
  static constexpr double kFirstAccuracy = 0.6;

  explicit Lookahead(int num_layers) : accuracy_(num_layers, kFirstAccuracy) {}

  bool pays(int layer) const {
    const double accuracy = accuracy_[layer];
    if (accuracy < kLeastAccuracy) return false;
    const auto [fetch_ns, cpu_ns] = costs_;
    if (fetch_ns <= 0.0 || cpu_ns <= 0.0) return true;
    const double saved_ns = fetch_ns * cpu_ns / (fetch_ns + cpu_ns);
    return accuracy * saved_ns > (1.0 - accuracy) * std::max(0.0, fetch_ns - idle_ns_);
  }

  // A guess for this layer was right, or not.
  void observe(int layer, bool used) { accuracy_[layer] += ((used ? 1.0 : 0.0) - accuracy_[layer]) / kMemory; }
  // The bus had nothing to do for so long, from one layer to the next.
  void observe_idle(double ns) { idle_ns_ += (ns - idle_ns_) / kMemory; }
  void set_costs(const RecordCosts& costs) { costs_ = costs; }

  double idle_ns() const { return idle_ns_; }
  double mean_accuracy() const {
    double sum = 0.0;
    for (const double accuracy : accuracy_) sum += accuracy;
    return sum / static_cast<double>(accuracy_.size());
  }

 private:
  static constexpr double kMemory = 32.0;

  std::vector<double> accuracy_;  // by layer
  double idle_ns_ = 0.0;
  RecordCosts costs_;
};

}  // namespace ft
