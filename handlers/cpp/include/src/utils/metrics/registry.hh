// Metrics of handlers: those that the server's metrics configuration declares under model_metrics.
#pragma once

#include <cstddef>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace torchserve {

enum MetricType { COUNTER, GAUGE, HISTOGRAM };

// Functions of the worker; without them no metric is known.
struct MetricSink {
  using Knows = bool (*)(int type, const char* name);
  using Report = void (*)(int type, const char* name, const char* const* dimensions, std::size_t count,
                          const char* request_ids, double value);

  Knows knows = nullptr;
  Report report = nullptr;
};

class IMetric {
 public:
  IMetric(MetricType type, const std::string& name, const MetricSink& sink)
      : type_(type), name_(name), sink_(sink) {}
  virtual ~IMetric() = default;

  // Reports a value, with one dimension value for each declared dimension. A wrong report is logged and
  // dropped.
  virtual void AddOrUpdate(const std::vector<std::string>& dimension_values, const double& value) {
    AddOrUpdate(dimension_values, "", value);
  }

  // The same for one request, or for several: `request_id` has their ids, separated by commas.
  virtual void AddOrUpdate(const std::vector<std::string>& dimension_values, const std::string& request_id,
                           const double& value) {
    std::vector<const char*> dimensions;
    for (const auto& each : dimension_values) {
      dimensions.push_back(each.c_str());
    }
    sink_.report(type_, name_.c_str(), dimensions.data(), dimensions.size(), request_id.c_str(), value);
  }

 private:
  const MetricType type_;
  const std::string name_;
  const MetricSink& sink_;
};

class MetricsCache {
 public:
  // Throws std::invalid_argument if no metric of that type and name is declared.
  IMetric& GetMetric(const MetricType& type, const std::string& name) {
    for (auto& metric : metrics_) {
      if (metric.type == type && metric.name == name) {
        return *metric.metric;
      }
    }
    if (sink.knows == nullptr || !sink.knows(type, name.c_str())) {
      throw std::invalid_argument("no metric " + name + " of that type is declared under model_metrics");
    }
    metrics_.push_back({type, name, std::make_unique<IMetric>(type, name, sink)});
    return *metrics_.back().metric;
  }

  MetricSink sink;

 private:
  struct Known {
    MetricType type;
    std::string name;
    std::unique_ptr<IMetric> metric;
  };

  std::vector<Known> metrics_;
};

class MetricsRegistry {
 public:
  static std::shared_ptr<MetricsCache>& GetMetricsCacheInstance() {
    static auto cache = std::make_shared<MetricsCache>();
    return cache;
  }
};

}  // namespace torchserve
